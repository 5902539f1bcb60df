"""Softmax attention with grouped heads, rotary positions or none, and a window or none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.shapes import ROPE_THETA, heads
from tensorformer.nn.norm import unit_rms
from tensorformer.nn.positions import Places, places
from tensorformer.nn.rope import Rope, rotate
from tensorformer.nn.state import MixerState, SoftmaxState, fitting


class SoftmaxAttention(nn.Module):
    """Causal attention, softmax(q·k / √D) v (Vaswani et al. 2017), with rotary positions on q and k.

    Args:
        config: heads and their size, whether q and k are RMS-normed per head or turned, and how far back they see.
        d_model: width of the input and the output.
        eps: of the norm on q and k.
    """

    def __init__(self, config: schema.SoftmaxAttention, d_model: int, eps: float) -> None:
        super().__init__()
        self.heads = heads(config, d_model)
        self.qk_norm, self.window, self.eps = config.qk_norm, config.window, eps
        h, h_kv, k, _ = self.heads
        self.q_proj = nn.Linear(d_model, h * k, bias=False)
        self.k_proj = nn.Linear(d_model, h_kv * k, bias=False)
        self.v_proj = nn.Linear(d_model, h_kv * k, bias=False)
        self.o_proj = nn.Linear(h * k, d_model, bias=False)
        self.rope = Rope(k, config.rope_theta or ROPE_THETA) if config.position == "rope" else None

    def initial_state(self, batch: int) -> SoftmaxState:
        """Return the state before the first token."""
        return SoftmaxState.empty(batch, self.heads.n_kv_heads, self.heads.head_dim, self.q_proj.weight)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: MixerState | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], SoftmaxState | None]:
        """Return the output, and the state after the last token if one was given.

        Args:
            x: the input.
            state: what came before; the first document of a row goes on from it.
            segments: −1 is padding, whose output is zero; a new number starts a new document.
        """
        if state is not None:
            state = fitting(state, self.initial_state(0), "softmax attention", rows=x.shape[0])
        at = places(x.shape[:2], x.device, state.seen if state else None, segments)
        q, k, v = self._projected(x, at)
        after = None
        if state is None:
            mask = None if segments is None and self.window is None else self._mask(at, at.position, at.document)
        else:
            k, v, mask, after = self._remembered(state, k, v, at)
        grouped = self.heads.n_kv_heads != self.heads.n_heads
        causal = mask is None and x.shape[1] > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        y = y.transpose(1, 2).flatten(2)
        if at.document is not None:
            y = y.masked_fill((at.document < 0).unsqueeze(2), 0)
        return self.o_proj(y), after

    def weights(
        self, x: Float[Tensor, "b t d"], segments: Int[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return softmax(q·k / √D), the weight of step s in step t's sum over values."""
        at = places(x.shape[:2], x.device, None, segments)
        q, k, _ = self._projected(x, at)
        k = k.repeat_interleave(self.heads.n_heads // self.heads.n_kv_heads, 1)
        scores = q @ k.transpose(2, 3) * self.heads.head_dim**-0.5
        seen = self._mask(at, at.position, at.document)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return weights if at.document is None else weights.masked_fill((at.document < 0)[:, None, :, None], 0)

    def _projected(self, x: Float[Tensor, "b t d"], at: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as (b, heads, t, head_dim)."""
        if at.document is not None:  # not even NaN in padding is to reach a token
            x = x.masked_fill((at.document < 0).unsqueeze(2), 0)
        q, k, v = (p(x).unflatten(-1, (-1, self.heads.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = unit_rms(q, self.eps), unit_rms(k, self.eps)
        if self.rope is not None:
            tables = self.rope.tables(at.position)
            q, k = rotate(q, tables), rotate(k, tables)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _mask(
        self, at: Places, key_position: Int[Tensor, "*b n"], key_document: Int[Tensor, "b n"] | None
    ) -> Bool[Tensor, "b 1 t n"]:
        """Return which keys each query sees; padding sees padding, so that no row of scores is empty."""
        query, key = at.position.unsqueeze(-1), key_position.unsqueeze(-2)
        mask = (key >= 0) & (key <= query)
        if self.window is not None:
            mask = mask & (key > query - self.window)
        if at.document is not None and key_document is not None:
            padding = (at.document < 0).unsqueeze(2)
            mask = torch.where(padding, True, mask & (at.document.unsqueeze(2) == key_document.unsqueeze(1)))
        return mask[None, None] if mask.ndim == 2 else mask.unsqueeze(1)

    def _remembered(
        self, state: SoftmaxState, k: Tensor, v: Tensor, at: Places
    ) -> tuple[Tensor, Tensor, Tensor | None, SoftmaxState]:
        """Return all keys and values, which of them each query sees, and the state after the call."""
        position, document = at.position, at.document
        if document is not None:
            position = position.masked_fill(document < 0, -1)
        whole = state.append(k, v, position)
        n, t = whole.k.shape[2], k.shape[2]
        if document is None:
            unmasked = n == t and self.window is None  # nothing came before: causal is all there is to say
            mask, after = None if unmasked else self._mask(at, whole.position, None), whole
        else:
            owner = F.pad(document, (n - t, 0))  # what was there belongs to the first document
            mask = self._mask(at, whole.position, owner)
            # The last document of a row goes on in the next call; those before it have come to their end.
            last = document.amax(1, keepdim=True).clamp_min(0)
            after = SoftmaxState(whole.k, whole.v, whole.position.masked_fill(owner != last, -1))
            after = whole if bool((after.position == whole.position).all()) else after.latest()
        if self.window is not None and n > 2 * self.window:
            after = after.latest(self.window)
        return whole.k.to(k.dtype), whole.v.to(v.dtype), mask, after
