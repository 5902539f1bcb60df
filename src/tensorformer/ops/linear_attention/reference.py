"""The recurrence, one step after another: what every other form of linear attention must equal."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def features(x: tuple[Tensor, ...]) -> Tensor:
    """Return φ(x) = x for one branch, x₁ ⊗ x₂ flattened row-major for two, along the last axis."""
    return x[0] if len(x) == 1 else torch.einsum("...i,...j->...ij", x[0], x[1]).flatten(-2)


def recurrence(
    q: tuple[Float[Tensor, "batch time key_heads _"], ...],
    k: tuple[Float[Tensor, "batch time key_heads _"], ...],
    v: Float[Tensor, "batch time heads value"],
    log_decay: tuple[Float[Tensor, "batch time heads *_"], ...] = (),
    state: Float[Tensor, "batch heads key value"] | None = None,
    beta: Float[Tensor, "batch time heads"] | None = None,
    delta: bool = False,
    segments: Int[Tensor, "batch time"] | None = None,
) -> tuple[Float[Tensor, "batch time heads value"], Float[Tensor, "batch heads key value"]]:
    """Run S_t = D_t S_{t−1} + β_t φ(k_t) (v_t − [delta] φ(k_t)ᵀ D_t S_{t−1})ᵀ, y_t = φ(q_t)ᵀ S_t in float32 or better.

    `log_decay` is empty, one tensor (batch, time, heads), or one (batch, time, heads, K_r) for every branch.
    Plain torch operations on new tensors only, so autograd differentiates it any number of times; it keeps
    every state for that, O(T·K·V). A log-decay of −inf forgets everything before its step.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    if segments is not None:
        q, k, (v,), log_decay = (_real(x, segments) for x in (q, k, (v,), log_decay))
        beta = None if beta is None else _real((beta,), segments)[0]
    batch, time, heads, value = v.shape
    groups = heads // max(1, q[0].shape[2])
    q, k = (tuple(x.to(wide).repeat_interleave(groups, 2) for x in branches) for branches in (q, k))
    phi_q, phi_k = features(q), features(k)
    # One number a head is a feature of size one, which multiplies all channels.
    decays = [(x if x.ndim == 4 else x.unsqueeze(3)).to(wide).exp() for x in log_decay]
    decay = features(tuple(decays)).unsqueeze(4) if decays else None
    s = v.new_zeros(batch, heads, phi_k.shape[-1], value, dtype=wide) if state is None else state.to(wide)
    document = torch.full((batch, 1, 1, 1), -1, device=v.device)
    outputs = []
    for t in range(time):
        if decay is not None:
            s = s * decay[:, t]
        if segments is not None:
            here = segments[:, t, None, None, None]
            s = torch.where((here >= 0) & (document >= 0) & (here != document), 0, s)
            document = torch.where(here >= 0, here, document)
        u = v[:, t].to(wide)
        if delta:
            u = u - torch.einsum("bhk,bhkv->bhv", phi_k[:, t], s)
        if beta is not None:
            u = u * beta[:, t, :, None].to(wide)
        s = s + phi_k[:, t, :, :, None] * u[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", phi_q[:, t], s))
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(v, dtype=wide)
    return y.to(v.dtype), s


def _real(operands: tuple[Tensor, ...], segments: Tensor) -> tuple[Tensor, ...]:
    """Return the operands with padding made zero: such a step forgets, writes and reads nothing."""
    return tuple(x.masked_fill((segments < 0).view(*segments.shape, *(1,) * (x.ndim - 2)), 0) for x in operands)
