"""Where a gate stops answering: the inputs beyond which a half stays at its limit, and the largest product."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tensorformer.gates import Gate, Scalar
from tensorformer.study.ranges_result import Saturation

Side = Literal["low", "high"]

TOLERANCE = 0.01  # of the limit; absolute where the limit is 0
_FAR = 30  # octaves out to which a function is looked at: PowLU comes within 1 % of its limit at 5e7
_FINE = 64  # points an octave
_BISECTIONS = 60


class SaturationCount:
    """Counts the inputs of one half of a gate that lie where it is saturated."""

    def __init__(self, half: Scalar) -> None:
        self._cutoffs = cutoffs(half)
        self._beyond = dict.fromkeys(self._cutoffs, 0)
        self._n = 0

    def update(self, x: Float[Tensor, "*shape"]) -> None:
        """Count the finite inputs ``x``."""
        x = x[x.isfinite()]
        self._n += x.numel()
        for side, (_, at) in self._cutoffs.items():
            self._beyond[side] += int((x <= at if side == "low" else x >= at).sum())

    def result(self) -> dict[Side, Saturation]:
        """Return the sides that have a limit."""
        n = max(self._n, 1)
        return {side: Saturation(limit, at, self._beyond[side] / n) for side, (limit, at) in self._cutoffs.items()}


def cutoffs(half: Scalar) -> dict[Side, tuple[float, float]]:
    """Return for each side the limit of a function and the input from which on outwards it is saturated.

    From there on it stays within ``TOLERANCE`` of its limit:  |f(x) − L| ≤ 0.01·|L|, or ≤ 0.01 where L = 0.

    Args:
        half: a scalar.

    Returns:
        Side → limit and input; without a side where the limit is infinite, and empty where parameters differ from
        unit to unit.
    """
    if _varies(half):
        return {}
    found: dict[Side, tuple[float, float]] = {}
    limits = half(torch.tensor([-math.inf, math.inf], dtype=torch.float64)).tolist()
    sides: tuple[tuple[Side, Tensor], ...] = (("low", _grid()), ("high", _grid().flip(0)))
    for (side, outside_in), limit in zip(sides, limits, strict=True):
        if math.isfinite(limit) and (at := _cutoff(half, outside_in, limit)) is not None:
            found[side] = limit, at
    return found


def bound(activation: Gate | Scalar) -> float | None:
    """Return the largest |h| that the formula allows: sup|φ| · sup|ψ|; None where there is none, or one a unit."""
    halves = (activation.gate, activation.value) if isinstance(activation, Gate) else (activation,)
    if any(map(_varies, halves)):
        return None
    product = math.prod(map(_supremum, halves))
    return product if math.isfinite(product) else None


def _varies(half: Scalar) -> bool:
    return any(isinstance(p, Tensor) and p.numel() > 1 for p in half.parameters.values())


def _supremum(half: Scalar) -> float:
    return max(map(abs, half.image))


def _cutoff(half: Scalar, outside_in: Float64[Tensor, " n"], limit: float) -> float | None:
    """Return the last point, coming from outside, up to which the function has stayed near its limit."""
    tolerance = TOLERANCE * (abs(limit) or 1.0)
    far = ((half(outside_in) - limit).abs() > tolerance).nonzero()
    if not len(far):  # nowhere does it leave its limit
        return float(outside_in[-1])
    first = int(far[0])
    if first == 0:  # still far from its limit where the grid ends: no input is saturated
        return None
    inside, outside = float(outside_in[first]), float(outside_in[first - 1])
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        at = half(torch.tensor(middle, dtype=torch.float64))
        if abs(float(at) - limit) > tolerance:
            inside = middle
        else:
            outside = middle
    return outside


@cache
def _grid() -> Float64[Tensor, " n"]:
    """Return points from −2³⁰ to 2³⁰, even in their logarithm down to 2⁻³⁰, and 0."""
    half = torch.exp2(torch.arange(-_FAR * _FINE, _FAR * _FINE + 1, dtype=torch.float64) / _FINE)
    return torch.cat((-half.flip(0), torch.zeros(1, dtype=torch.float64), half))
