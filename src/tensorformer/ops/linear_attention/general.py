"""The delta rule and a decay a channel: spans of chunks that carry the state, and one autograd function around them.

Forward keeps the state before every span, backward takes the spans from the last to the first and works out again
what it needs. All is computed in float32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.ops.linear_attention import one_span
from tensorformer.ops.linear_attention.derivative import differentiable_backward
from tensorformer.ops.linear_attention.fast import Group, groups
from tensorformer.ops.linear_attention.one_span import Chunks
from tensorformer.ops.linear_attention.plan import Span, span_chunks, spans
from tensorformer.ops.linear_attention.reference import features, recurrence


class Form(NamedTuple):
    """How many operands there are: branches of q and of k, log-decays, and whether there is a beta."""

    degree: int
    decays: int
    delta: bool

    def inputs(self, operands: Sequence[Tensor]) -> Inputs:
        """Return `operands`, in the order of `Inputs.all`, by their names."""
        rest = iter(operands)
        q, k = (tuple(next(rest) for _ in range(self.degree)) for _ in range(2))
        v, decays = next(rest), tuple(next(rest) for _ in range(self.decays))
        return Inputs(q, k, v, decays, next(rest) if self.delta else None)


class Inputs(NamedTuple):
    """The operands of a call, (B, T, H, ·), or their gradients. `beta` None is an additive update."""

    q: tuple[Float[Tensor, "b t h _"], ...]
    k: tuple[Float[Tensor, "b t h _"], ...]
    v: Float[Tensor, "b t h v"]
    log_decay: tuple[Float[Tensor, "b t h *_"], ...]
    beta: Float[Tensor, "b t h"] | None

    def all(self) -> list[Tensor]:
        return [*self.q, *self.k, self.v, *self.log_decay, *(() if self.beta is None else (self.beta,))]

    @property
    def form(self) -> Form:
        return Form(len(self.q), len(self.log_decay), self.beta is not None)

    def empty(self) -> Inputs:
        return self.form.inputs([torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self.all()])

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.v.dtype, torch.float32)

    @property
    def state_shape(self) -> tuple[int | torch.SymInt, ...]:
        batch, _, heads, value = self.v.shape
        return batch, heads, math.prod([x.shape[3] for x in self.k]), value

    def kept_shape(self, chunk: int) -> tuple[int | torch.SymInt, ...]:
        """Return the shape of a state for each of `spans`, also where time is a symbol."""
        time, most = self.v.shape[1], span_chunks(chunk)
        whole = time // chunk
        return (whole + most - 1) // most + (time + chunk - 1) // chunk - whole, *self.state_shape

    def chunks(self, group: Group, span: Span) -> Chunks:
        """Return the operands of a span, chunks and heads laid flat."""
        q, k = (tuple(_flat(x, group, span, self.wide) for x in branches) for branches in (self.q, self.k))
        return Chunks(
            span.chunks,
            q,
            k,
            _flat(self.v, group, span, self.wide),
            tuple(_flat(x, group, span, torch.float64) for x in self.log_decay),
            None if self.beta is None else _flat(self.beta, group, span, self.wide),
        )

    def write(self, group: Group, span: Span, part: Chunks) -> None:
        """Write the gradients of the steps of a span into their place."""
        found = [*part.q, *part.k, part.v, *part.log_decay, *(() if part.beta is None else (part.beta,))]
        for whole, x in zip(self.all(), found, strict=True):
            _write(whole, group, span, x)


def _steps(x: Float[Tensor, "b t h *_"], group: Group, span: Span) -> Float[Tensor, "m rows heads c *_"]:
    """Return a view of the steps of a span, chunk by chunk."""
    steps = x[group.rows, span.start : span.stop, group.heads]
    return steps.unflatten(1, (span.chunks, span.chunk)).movedim(1, 0).transpose(2, 3)


def _flat(x: Float[Tensor, "b t h *_"], group: Group, span: Span, dtype: torch.dtype) -> Float[Tensor, "mn c *_"]:
    return _steps(x, group, span).to(dtype).flatten(0, 2).contiguous()


def _write(whole: Float[Tensor, "b t h *_"], group: Group, span: Span, part: Float[Tensor, "mn c *_"]) -> None:
    view = _steps(whole, group, span)
    view.copy_(part.view(view.shape))


def forward(
    x: Inputs, state: Float[Tensor, "b h k v"] | None, chunk: int, final: bool, keep: bool
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "b h k v"] | None, Float[Tensor, "s b h k v"] | None]:
    """Return y, the state after the last step if `final`, and the state before every span if `keep`."""
    if x.v.shape[1] == 1 and state is not None and not keep:
        y, s = decode(x, state)
        return y, s if final else None, None
    time = x.v.shape[1]
    y = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    after = y.new_zeros(x.state_shape, dtype=x.wide) if final else None
    kept = y.new_zeros(x.kept_shape(chunk), dtype=x.wide) if keep else None
    with torch.autocast(x.v.device.type, enabled=False):
        cuts = spans(time, chunk)
        for group in groups(x.v, chunk, cuts[0].chunks if cuts else 1):
            s = None if state is None else group.state(state, x.wide)
            for i, span in enumerate(cuts):
                if kept is not None and s is not None:
                    group.write_state(kept[i], s)
                out, s = one_span.forward(x.chunks(group, span), s, final=final or span.stop < time)
                _write(y, group, span, out)
            if after is not None and s is not None:
                group.write_state(after, s)
    return y, after, kept


def backward(
    x: Inputs,
    kept: Float[Tensor, "s b h k v"],
    dy: Float[Tensor, "b t h v"] | None,
    d_state: Float[Tensor, "b h k v"] | None,
    chunk: int,
) -> tuple[Inputs, Float[Tensor, "b h k v"]]:
    """Return the gradients of the operands and of the initial state."""
    grads, d_initial = x.empty(), torch.zeros(x.state_shape, dtype=x.wide, device=x.v.device)
    with torch.autocast(x.v.device.type, enabled=False):
        cuts = spans(x.v.shape[1], chunk)
        for group in groups(x.v, chunk, cuts[0].chunks if cuts else 1):
            ds = None if d_state is None else group.state(d_state, x.wide)
            for i, span in reversed(list(enumerate(cuts))):
                part = x.chunks(group, span)
                d_y = torch.zeros_like(part.v) if dy is None else _flat(dy, group, span, x.wide)
                found, ds = one_span.backward(part, group.state(kept[i], x.wide), d_y, ds)
                grads.write(group, span, found)
            if ds is not None:
                group.write_state(d_initial, ds)
    return grads, d_initial


def decode(x: Inputs, state: Float[Tensor, "b h k v"]) -> tuple[Tensor, Tensor]:
    """Return y and the state after a single step: the same as `forward`, with less around it."""
    q, k = (features(tuple(b[:, 0].to(x.wide) for b in branches)) for branches in (x.q, x.k))
    s, u = state, x.v[:, 0].to(x.wide)
    if x.log_decay:
        decays = [(g if g.ndim == 4 else g.unsqueeze(3))[:, 0].to(x.wide).exp() for g in x.log_decay]
        s = s * features(tuple(decays)).unsqueeze(3)
    with torch.autocast(x.v.device.type, enabled=False):
        if x.beta is not None:
            u = (u - _read(k, s)) * x.beta[:, 0].unsqueeze(2).to(x.wide)
        s = torch.addcmul(s, k.unsqueeze(3), u.unsqueeze(2))
        y = _read(q, s)
    return y.unsqueeze(1).to(x.v.dtype), s


def _read(rows: Float[Tensor, "b h k"], s: Float[Tensor, "b h k v"]) -> Float[Tensor, "b h v"]:
    return torch.bmm(rows.flatten(0, 1).unsqueeze(1), s.flatten(0, 1)).view(*rows.shape[:2], -1)


class GeneralFunction(torch.autograd.Function):
    """`apply(form, chunk, final, state, *operands)` → (y, state or None), the operands in the order of `Inputs.all`."""

    @staticmethod
    def forward(
        ctx: Any, form: Form, chunk: int, final: bool, state: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        y, s, kept = forward(form.inputs(operands), state, chunk, final, keep=any(ctx.needs_input_grad))
        ctx.form, ctx.chunk = form, chunk
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, state, *operands)
        return y, s

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, d_state = d_outputs
        kept, state, *operands = ctx.saved_tensors
        form, needed = ctx.form, ctx.needs_input_grad[3:]
        if dy is None and d_state is None:
            return (None,) * (len(needed) + 3)
        if torch.is_grad_enabled():

            def call(state: Tensor | None, *operands: Tensor) -> tuple[Tensor, Tensor]:
                x = form.inputs(operands)
                return recurrence(x.q, x.k, x.v, x.log_decay, state, x.beta, form.delta)

            grads = differentiable_backward(call, (state, *operands), needed, (dy, d_state))
        else:
            found, d_initial = backward(form.inputs(operands), kept, dy, d_state, ctx.chunk)
            grads = [g if need else None for g, need in zip([d_initial, *found.all()], needed, strict=True)]
        return (None, None, None, *grads)
