"""The recurrence, one step after another: what every other form of linear attention must equal."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def features(x: tuple[Tensor, ...]) -> Tensor:
    """Return φ(x) = x for one branch, x₁ ⊗ x₂ flattened row-major for two, along the last axis."""
    return x[0] if len(x) == 1 else torch.einsum("...i,...j->...ij", x[0], x[1]).flatten(-2)


def recurrence(
    q: tuple[Float[Tensor, "batch time heads _"], ...],
    k: tuple[Float[Tensor, "batch time heads _"], ...],
    v: Float[Tensor, "batch time heads value"],
    log_decay: Float[Tensor, "batch time heads"] | None,
    state: Float[Tensor, "batch heads key value"] | None,
) -> tuple[Float[Tensor, "batch time heads value"], Float[Tensor, "batch heads key value"]]:
    """Run S_t = exp(log_decay_t) S_{t−1} + φ(k_t) v_tᵀ, y_t = φ(q_t)ᵀ S_t in float32 or better.

    Plain torch operations on new tensors only, so autograd differentiates it any number of times; it keeps
    every state for that, O(T·K·V). A log-decay of −inf forgets everything before its step.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    phi_q, phi_k = features(tuple(x.to(wide) for x in q)), features(tuple(x.to(wide) for x in k))
    batch, time, heads, value = v.shape
    s = v.new_zeros(batch, heads, phi_k.shape[-1], value, dtype=wide) if state is None else state.to(wide)
    outputs = []
    for t in range(time):
        if log_decay is not None:
            s = s * log_decay[:, t].to(wide).exp()[:, :, None, None]
        s = s + phi_k[:, t, :, :, None] * v[:, t, :, None, :].to(wide)
        outputs.append(torch.einsum("bhk,bhkv->bhv", phi_q[:, t], s))
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(v, dtype=wide)
    return y.to(v.dtype), s
