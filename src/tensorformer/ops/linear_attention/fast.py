"""The fast path: one autograd function around the chunked form. It saves its inputs and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorformer.ops.linear_attention import chunked
from tensorformer.ops.linear_attention.chunked import Operands
from tensorformer.ops.linear_attention.plan import group_size
from tensorformer.ops.linear_attention.reference import recurrence


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, H, ·) → (B·H, T, ·): a view where strides and dtype allow, a copy where not."""
    return x.to(dtype).transpose(1, 2).flatten(0, 1)


def _lay_flat(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor, g: Tensor | None, s: Tensor | None) -> Operands:
    # Products of two float16 Gram matrices leave float16's range where the result does not.
    dtype = torch.float32 if v.dtype == torch.float16 else v.dtype
    return Operands(
        tuple(_flat(x, dtype) for x in q),
        tuple(_flat(x, dtype) for x in k),
        _flat(v, dtype),
        None if g is None else _flat(g, g.dtype),
        None if s is None else s.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1),
    )


def forward(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor, log_decay: Tensor | None, state: Tensor | None,
    chunk: int, final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, T, H, V) and, if `final`, the state (B, H, K, V)."""
    batch, time, heads, _ = v.shape
    with torch.autocast(v.device.type, enabled=False):
        x = _lay_flat(q, k, v, log_decay, state)
        if time == 1:
            y, s = chunked.step(x)
        else:
            parts = [chunked.forward(part, chunk, final) for part in x.groups(group_size(x.v, chunk))]
            y, s = (_joined([part[i] for part in parts]) for i in (0, 1))
        assert y is not None
        y = y.unflatten(0, (batch, heads)).transpose(1, 2).to(v.dtype)
        return y, s.unflatten(0, (batch, heads)) if final and s is not None else None


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    kept = [part for part in parts if part is not None]
    return None if not kept else kept[0] if len(kept) == 1 else torch.cat(kept)


def backward(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor, log_decay: Tensor | None, state: Tensor | None,
    dy: Tensor | None, d_state: Tensor | None, chunk: int,
    state_needed: bool, decay_needed: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of v, log_decay, state, and every branch of q and k, each like its operand."""
    batch, _, heads, _ = v.shape
    with torch.autocast(v.device.type, enabled=False):
        x = _lay_flat(q, k, v, log_decay, state)
        dy = None if dy is None else _flat(dy, x.v.dtype)
        d_state = None if d_state is None else d_state.flatten(0, 1)
        size = group_size(x.v, chunk)
        parts = []
        for i, part in enumerate(x.groups(size)):
            here = slice(i * size, (i + 1) * size)
            d_y, d_s = (None if d is None else d[here] for d in (dy, d_state))
            grads = chunked.backward(part, d_y, d_s, chunk, state_needed, decay_needed)
            parts.append((grads.v, grads.log_decay, grads.state, *grads.q, *grads.k))
        joined = [_joined(list(column)) for column in zip(*parts, strict=True)]

    def like(grad: Tensor | None, operand: Tensor | None) -> Tensor | None:
        if grad is None or operand is None:
            return None
        grad = grad.unflatten(0, (batch, heads))
        return (grad if operand is state else grad.transpose(1, 2)).to(operand.dtype)

    return tuple(like(g, o) for g, o in zip(joined, (v, log_decay, state, *q, *k), strict=True))


class LinearAttentionFunction(torch.autograd.Function):
    """`apply(chunk, final, v, log_decay, state, *q, *k)` → (y, state or None)."""

    @staticmethod
    def forward(
        ctx: Any, chunk: int, final: bool, v: Tensor, log_decay: Tensor | None, state: Tensor | None, *qk: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, log_decay, state, *qk)
        half = len(qk) // 2
        return forward(qk[:half], qk[half:], v, log_decay, state, chunk, final)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, d_state = d_outputs
        v, log_decay, state, *qk = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if dy is None and d_state is None:
            return (None,) * (len(needed) + 2)
        half = len(qk) // 2
        q, k = tuple(qk[:half]), tuple(qk[half:])
        if torch.is_grad_enabled():
            grads = _differentiable_backward(q, k, v, log_decay, state, dy, d_state, needed)
        else:
            grads = backward(q, k, v, log_decay, state, dy, d_state, ctx.chunk, needed[2], needed[1])
        return (None, None, *grads)


def _differentiable_backward(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor, log_decay: Tensor | None, state: Tensor | None,
    dy: Tensor | None, d_state: Tensor | None, needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands as functions of them, through the recurrence.

    Second derivatives are for study and tests at small sizes: they cost what the reference costs.
    """
    with torch.autocast(v.device.type, enabled=False):
        outputs = recurrence(q, k, v, log_decay, state)
        pairs = [(o, d) for o, d in zip(outputs, (dy, d_state), strict=True) if d is not None]
        wanted = [x for x, need in zip((v, log_decay, state, *q, *k), needed, strict=True) if need]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [d for _, d in pairs], create_graph=True, allow_unused=True
            )
        )
    return tuple(next(found) if need else None for need in needed)
