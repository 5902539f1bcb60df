"""Normalisation layers by the names recipes use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tensorformer.config.schema import Model


def make_norm(model: Model) -> torch.nn.Module:
    """Return the norm that stands before every part of a block: RMSNorm with gain, or LayerNorm with gain and bias."""
    kind = torch.nn.RMSNorm if model.norm == "rms_norm" else torch.nn.LayerNorm
    return kind(model.d_model, eps=model.norm_eps)


def unit_rms(x: Float[Tensor, "*shape d"], eps: float) -> Float[Tensor, "*shape d"]:
    """Return ``x / √(mean(x²) + eps)`` over the last axis: RMSNorm without gain."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)
