"""Attention without softmax: bilinear attention and its degree-1 relatives, around one operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.shapes import PRESETS, heads
from tensorformer.nn.norm import unit_rms
from tensorformer.nn.rope import Rope, rotate
from tensorformer.nn.state import LinearState
from tensorformer.ops.linear_attention import linear_attention
from tensorformer.ops.linear_attention.api import Branches


class LinearAttention(nn.Module):
    """Causal attention whose weight is a product of ``degree`` dot products, Π_r (q_r·k_r / D), with no softmax.

    Every q and k is RMS-normed per head without gain, turned to its position, and scaled by 1/√D, so that each
    branch carries 1/D. What a preset adds (decay, a norm on each head's output) stands in its line of ``PRESETS``.

    Args:
        config: the preset, heads and their sizes.
        d_model: width of the input and the output.
        eps: of the norms on q, k and the heads' outputs.
    """

    log_decay: Tensor

    def __init__(self, config: schema.LinearAttention, d_model: int, eps: float) -> None:
        super().__init__()
        self.heads, self.preset, self.eps = heads(config, d_model), PRESETS[config.preset], eps
        h, _, k, v = self.heads
        self.q_proj = nn.ModuleList(nn.Linear(d_model, h * k, bias=False) for _ in range(self.preset.degree))
        self.k_proj = nn.ModuleList(nn.Linear(d_model, h * k, bias=False) for _ in range(self.preset.degree))
        self.v_proj = nn.Linear(d_model, h * v, bias=False)
        self.o_proj = nn.Linear(h * v, d_model, bias=False)
        self.rope = Rope(k, config.rope_theta)
        if self.preset.decay == "learned":
            self.decay_proj = nn.Linear(d_model, h)
        elif self.preset.decay == "fixed":  # RetNet's 1 − 2^(−5−i)
            steps = torch.log1p(-(2.0 ** (-5 - torch.arange(h, dtype=torch.float64))))
            self.register_buffer("log_decay", steps.float(), persistent=False)

    def initial_state(self, batch: int) -> LinearState:
        """Return the state before the first token."""
        features = self.heads.head_dim**self.preset.degree
        return LinearState.empty(batch, self.heads.n_heads, features, self.heads.value_dim, self.v_proj.weight)

    def forward(
        self, x: Float[Tensor, "b t d"], state: LinearState | None = None
    ) -> tuple[Float[Tensor, "b t d"], LinearState | None]:
        """Return the output, and the state after the last token if one was given."""
        b, t, _ = x.shape
        tables = self.rope.tables(state.position if state else 0, t)
        scale = self.heads.head_dim**-0.5
        tables = (tables[0] * scale, tables[1] * scale)  # the scale rides on the rotation

        def branches(projections: nn.ModuleList) -> Branches:
            shape = (b, t, self.heads.n_heads, self.heads.head_dim)
            turned = [rotate(unit_rms(p(x).view(shape), self.eps), tables) for p in projections]
            return turned[0] if len(turned) == 1 else (turned[0], turned[1])

        v = self.v_proj(x).view(b, t, self.heads.n_heads, self.heads.value_dim)
        y, memory = linear_attention(
            branches(self.q_proj),
            branches(self.k_proj),
            v,
            log_decay=self._log_decay(x),
            state=state.memory if state else None,
            final_state=state is not None,
        )
        if self.preset.output_norm:
            y = unit_rms(y, self.eps)
        after = LinearState(memory, state.position + t) if state and memory is not None else None
        return self.o_proj(y.flatten(2)), after

    def _log_decay(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h"] | None:
        if self.preset.decay == "learned":
            gate = self.decay_proj(x)
            return F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        if self.preset.decay == "fixed":
            return self.log_decay.expand(*x.shape[:2], -1)
        return None
