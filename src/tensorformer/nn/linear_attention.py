"""Attention without softmax: the presets around one operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.presets import resolved
from tensorformer.config.shapes import ROPE_THETA, heads
from tensorformer.nn.convolution import ShortConvolution
from tensorformer.nn.decay import make_decay
from tensorformer.nn.head_output import HeadOutput
from tensorformer.nn.norm import unit_l2, unit_rms
from tensorformer.nn.positions import Places, places
from tensorformer.nn.rope import Rope, rotate
from tensorformer.nn.state import LinearState, MixerState, fitting
from tensorformer.ops.linear_attention import linear_attention
from tensorformer.ops.linear_attention.api import Branches


class Operands(NamedTuple):
    """What the operator takes of a layer's input, and what the convolution keeps."""

    q: Branches
    k: Branches
    v: Float[Tensor, "b t h v"]
    log_decay: Float[Tensor, "b t h *k"] | None
    beta: Float[Tensor, "b t h"] | None
    convolution: Float[Tensor, "b before channels"] | None


class LinearAttention(nn.Module):
    """Causal attention whose weight is a product of one or two dot products, with no softmax.

    y_t = Σ_s decay(s → t) · Π_r (D^p · q_r,t·k_r,s) · v_s, under the delta rule with what is already remembered
    taken out of each v; then a norm on each head's output, a gate, and the output projection. Which of the parts
    a preset has stands in its line of ``PRESETS``.

    Args:
        config: the preset, heads and their sizes.
        d_model: width of the input and the output.
        eps: of the norms on q, k and the heads' outputs.
    """

    def __init__(self, config: schema.LinearAttention, d_model: int, eps: float) -> None:
        super().__init__()
        self.heads, self.preset, self.eps = heads(config, d_model), resolved(config), eps
        h, h_k, k, v = self.heads
        p = self.preset
        self.q_proj = nn.ModuleList(nn.Linear(d_model, h_k * k, bias=False) for _ in range(p.branches))
        self.k_proj = nn.ModuleList(nn.Linear(d_model, h_k * k, bias=False) for _ in range(p.branches))
        self.v_proj = nn.Linear(d_model, h * v, bias=False)
        self.convolution = None
        if p.taps:
            self.convolution = ShortConvolution(2 * p.branches * h_k * k + h * v, p.taps, p.taps_bias)
        self.rope = Rope(k, config.rope_theta or ROPE_THETA) if p.rotary else None
        self.decay = make_decay(p, self.heads, d_model)
        self.beta_proj = nn.Linear(d_model, h, bias=False) if p.written == "beta" else None
        self.skip = nn.Parameter(torch.ones(h)) if p.skip else None
        self.output = HeadOutput(p, self.heads, d_model, eps)
        self.o_proj = nn.Linear(h * v, d_model, bias=False)

    def initial_state(self, batch: int) -> LinearState:
        """Return the state before the first token."""
        weight, p = self.v_proj.weight, self.preset
        dtype = torch.promote_types(weight.dtype, torch.float32)
        values = p.summed(self.heads.value_dim)
        memory = torch.zeros(
            batch, self.heads.n_heads, self.heads.head_dim**p.degree, values, dtype=dtype, device=weight.device
        )
        before = None if self.convolution is None else self.convolution.empty(batch)
        return LinearState(memory, before, torch.zeros(batch, dtype=torch.int64, device=weight.device))

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: MixerState | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], LinearState | None]:
        """Return the output, and the state after the last token if one was given.

        Args:
            x: the input.
            state: what came before; the first document of a row goes on from it.
            segments: −1 is padding, whose output is zero; a new number starts a new document.
        """
        if state is not None:
            state = fitting(state, self.initial_state(0), "linear attention", rows=x.shape[0])
        x, at = self._placed(x, state, segments)
        operands = self._operands(x, at, state.convolution if state else None, segments)
        y, memory = self._sum(operands, operands.v, state, segments)
        y = self.output(y, x, at.position)
        if at.document is not None:  # a gate or a norm's eps leaves zero at zero, a skip does not
            y = y.masked_fill((at.document < 0).unsqueeze(2), 0)
        after = (
            LinearState(memory, operands.convolution, at.after(state.seen)) if state and memory is not None else None
        )
        return self.o_proj(y), after

    def weights(
        self, x: Float[Tensor, "b t d"], segments: Int[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return the weight of step s in step t's sum over values, before norm and gate: y_t = Σ_s weight · v_s.

        They are what the operator makes of one value a step that is 1 there and 0 elsewhere, so they hold the
        decay, the delta rule and all else that happens to values between two steps.
        """
        x, at = self._placed(x, None, segments)
        operands = self._operands(x, at, None, segments)
        b, t, h, _ = operands.v.shape
        steps = torch.eye(t, dtype=operands.v.dtype, device=x.device)[None, :, None].expand(b, t, h, t)
        return self._sum(operands, steps, None, segments)[0].transpose(1, 2)

    def _placed(
        self, x: Float[Tensor, "b t d"], state: LinearState | None, segments: Int[Tensor, "b t"] | None
    ) -> tuple[Float[Tensor, "b t d"], Places]:
        at = places(x.shape[:2], x.device, state.seen if state else None, segments)
        if at.document is not None:  # not even NaN in padding is to reach a token
            x = x.masked_fill((at.document < 0).unsqueeze(2), 0)
        return x, at

    def _operands(
        self, x: Float[Tensor, "b t d"], at: Places, before: Tensor | None, segments: Tensor | None
    ) -> Operands:
        raw = [p(x) for p in (*self.q_proj, *self.k_proj, self.v_proj)]
        if self.convolution is not None:
            mixed, before = self.convolution(torch.cat(raw, -1), before, segments)
            raw = mixed.split([r.shape[-1] for r in raw], -1)
        *features, v = (r.unflatten(-1, (-1, n)) for r, n in zip(raw, self._sizes(), strict=True))
        tables = self.rope.tables(at.position) if self.rope else None
        scale = self.heads.head_dim**self.preset.scale_power
        n = len(self.q_proj)
        q = [self._feature(f, tables, scale) for f in features[:n]]
        k = [self._feature(f, tables, 1.0) for f in features[n:]]
        log_decay, beta = (None, None) if self.decay is None else self.decay(x)
        if self.beta_proj is not None:
            gate = self.beta_proj(x)
            beta = self.preset.max_beta * torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        return Operands(self._branches(q), self._branches(k), v, log_decay, beta, before)

    def _sizes(self) -> list[int]:
        return [self.heads.head_dim] * 2 * len(self.q_proj) + [self.heads.value_dim]

    def _feature(
        self, x: Float[Tensor, "b t h k"], tables: tuple[Tensor, Tensor] | None, scale: float
    ) -> Float[Tensor, "b t h k"]:
        """Return one branch's queries or keys: normed, turned and scaled."""
        if self.preset.unit == "rms":
            x = unit_rms(x, self.eps)
        elif self.preset.unit == "l2":
            x, scale = unit_l2(x, self.eps, scale), 1.0
        if tables is not None:
            return rotate(x, tables if scale == 1 else (tables[0] * scale, tables[1] * scale))
        return x if scale == 1 else x * scale

    def _branches(self, x: list[Tensor]) -> Branches:
        if self.preset.degree == 1:
            return x[0]
        return x[0], x[-1]

    def _sum(
        self, operands: Operands, values: Float[Tensor, "b t h v"], state: LinearState | None, segments: Tensor | None
    ) -> tuple[Float[Tensor, "b t h v"], Tensor | None]:
        """Return the heads' weighted sums of ``values``, and the memory after them if a state was given."""
        row = self.preset.output_norm == "row"
        v = torch.cat((values, torch.ones_like(values[..., :1])), -1) if row else values
        y, memory = linear_attention(
            operands.q,
            operands.k,
            v,
            log_decay=operands.log_decay,
            state=state.memory if state else None,
            beta=operands.beta,
            update=self.preset.update,
            segments=segments,
            final_state=state is not None,
        )
        if row:
            y = y[..., :-1] / (y[..., -1:] + self.eps)
        if self.skip is not None:
            y = y + (values * self.skip[:, None]).to(y.dtype)
        return y, memory
