"""Softmax attention with rotary positions and grouped heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.shapes import heads
from tensorformer.nn.norm import unit_rms
from tensorformer.nn.rope import Rope, rotate
from tensorformer.nn.state import SoftmaxState


class SoftmaxAttention(nn.Module):
    """Causal attention, softmax(q·k / √D) v (Vaswani et al. 2017), with rotary positions on q and k.

    Args:
        config: heads, their size, and whether q and k are RMS-normed per head.
        d_model: width of the input and the output.
        eps: of the norm on q and k.
    """

    def __init__(self, config: schema.SoftmaxAttention, d_model: int, eps: float) -> None:
        super().__init__()
        self.heads = heads(config, d_model)
        self.qk_norm, self.eps = config.qk_norm, eps
        h, h_kv, k, _ = self.heads
        self.q_proj = nn.Linear(d_model, h * k, bias=False)
        self.k_proj = nn.Linear(d_model, h_kv * k, bias=False)
        self.v_proj = nn.Linear(d_model, h_kv * k, bias=False)
        self.o_proj = nn.Linear(h * k, d_model, bias=False)
        self.rope = Rope(k, config.rope_theta)

    def initial_state(self, batch: int) -> SoftmaxState:
        """Return the state before the first token."""
        return SoftmaxState.empty(batch, self.heads.n_kv_heads, self.heads.head_dim, self.q_proj.weight)

    def forward(
        self, x: Float[Tensor, "b t d"], state: SoftmaxState | None = None
    ) -> tuple[Float[Tensor, "b t d"], SoftmaxState | None]:
        """Return the output, and the state after the last token if one was given."""
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, self.heads.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = unit_rms(q, self.eps), unit_rms(k, self.eps)
        seen = state.position if state else 0
        tables = self.rope.tables(seen, t)
        q, k, v = rotate(q, tables).transpose(1, 2), rotate(k, tables).transpose(1, 2), v.transpose(1, 2)
        if state is not None:
            state = state.append(k.to(state.k.dtype), v.to(state.v.dtype))
            k, v = state.k.to(q.dtype), state.v.to(q.dtype)
        grouped = self.heads.n_kv_heads != self.heads.n_heads
        # With tokens already seen, a query at position p sees the keys up to p: a mask whose diagonal is shifted.
        mask = torch.ones(t, seen + t, dtype=torch.bool, device=x.device).tril(seen) if seen and t > 1 else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not seen and t > 1, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2)), state
