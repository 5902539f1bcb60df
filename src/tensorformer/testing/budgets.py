"""How far from the exact value an evaluation may be that rounds each operation once."""

from __future__ import annotations

from typing import Any

import mpmath
import torch

# A derivative crosses zero where its terms cancel: relative to its size, and absolute besides.
_SLOPE = {torch.float64: (1e-13, 1e-14), torch.float32: (1e-5, 2.5e-6)}


def value_budget(x: float, exact: Any, slope: Any, dtype: torch.dtype) -> Any:
    """Return the error allowed in f(x) = ``exact``, absolute.

    In units of the rounding of the dtype computed in (float32 for the small ones): sixteen operations, the rounded
    argument at one and a half times its effect, |x·f′/f|, and four times the exponent of an exponential, |log |f||.
    bfloat16 and float16 add half a unit of their own and a hundredth, for one rounding. The smallest normal number
    is always allowed, and a thousand of those of the dtype computed in, where a factor has underflowed before.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    unit = mpmath.mpf(torch.finfo(wide).eps) / 2
    size = abs(exact)
    if size == 0 or mpmath.isinf(slope) or mpmath.isinf(x):
        relative = 16 * unit
    else:
        relative = unit * (16 + 1.5 * abs(x * slope / exact) + 4 * abs(mpmath.log(size)))
    if dtype != wide:
        relative += mpmath.mpf(torch.finfo(dtype).eps) / 2 * 1.01
    return relative * size + torch.finfo(dtype).smallest_normal + 1024 * torch.finfo(wide).smallest_normal


def slope_budget(exact: Any, dtype: torch.dtype) -> Any:
    """Return the error allowed in f′(x) = ``exact``, absolute."""
    relative, absolute = _SLOPE.get(dtype, _SLOPE[torch.float32])
    if dtype not in _SLOPE:
        relative = torch.finfo(dtype).eps / 2 * 1.01
    return relative * abs(exact) + absolute + torch.finfo(dtype).smallest_normal
