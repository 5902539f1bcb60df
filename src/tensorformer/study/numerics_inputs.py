"""The points an implementation is tried at: the same ones every time, no two alike, in rows of neighbours.

A row is one centre with its neighbourhood. What a definition gets wrong is smooth across a row; what rounding does is
not, and averages out.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ROW = 33  # odd, so that a layout read wrongly can't come out even
TAILS = (-100.0, -30.0, -20.0, -13.0, -9.0, -8.0, -7.0, -6.0, -5.5, -5.0, 5.0, 9.0, 20.0, 100.0)
_MOST = 13.0
_FAR = (15.0, 18.0, 22.0, 26.0, 30.0)
_SMALL = (0.001, 0.004, 0.02)


@functools.lru_cache(maxsize=8)
def points(n_inputs: int) -> tuple[Tensor, ...]:
    """Return the inputs in float64, one tensor (rows, ROW) for each argument of the formula, all within ±32."""
    draw = torch.Generator().manual_seed(20)
    signed = [s * v for v in (*_FAR, *_SMALL) for s in (-1.0, 1.0)]
    n_rows = 180 if n_inputs == 1 else 380
    centres = torch.cat(
        (torch.linspace(-_MOST, _MOST, n_rows - len(signed), dtype=torch.float64), torch.tensor(signed))
    )
    found = []
    for i in range(n_inputs):
        # Each branch in an order of its own: together they cover the plane, and neither tells the other.
        c = centres if i == 0 else centres[torch.randperm(n_rows, generator=draw)]
        jitter = 2 * torch.rand(n_rows, ROW, dtype=torch.float64, generator=draw) - 1
        found.append(c[:, None] + (0.04 * c.abs() + 0.08).clamp(max=0.6)[:, None] * jitter)
    return tuple(found)


def along(values: tuple[float, ...], n_inputs: int) -> tuple[Tensor, ...]:
    """Return points along each axis in turn, the other branch at 1.5: one row, in float64."""
    axis = torch.tensor(values, dtype=torch.float64)
    if n_inputs == 1:
        return (axis[None],)
    other = torch.full_like(axis, 1.5)
    return torch.cat((axis, other))[None], torch.cat((other, axis))[None]
