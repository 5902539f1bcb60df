"""Points at which activations go wrong."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

TAILS = (-100.0, -20.0, -13.0, -9.0, -8.0, -5.0, -1.3, -1e-3, -0.0, 0.0, 1e-3, 0.7, 5.0, 9.0, 20.0, 100.0)


def points(dtype: torch.dtype) -> Float[Tensor, " n"]:
    """Return both tails, ±0, subnormals, the smallest and largest normal numbers, ±∞, and NaN as the last."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps * 2
    extremes = [subnormal, info.smallest_normal, info.max, math.inf]
    return torch.tensor([*TAILS, *extremes, *(-e for e in extremes), math.nan], dtype=dtype)
