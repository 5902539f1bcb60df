"""What happens far out: in the tails, at the largest numbers, at the infinities and at NaN, in float32."""

from __future__ import annotations

import math

import torch

from tensorformer.study.numerics_inputs import TAILS, along
from tensorformer.study.numerics_report import Edge
from tensorformer.study.numerics_search import Hypothesis
from tensorformer.study.numerics_target import Target

# Of the value: a careful float32 evaluation of GELU keeps 1.2e-5 at −13.
_TAIL = 1e-3
_LARGE = torch.finfo(torch.float32).max
_LIMITS = (-math.inf, -_LARGE, _LARGE, math.inf, math.nan)


def tails(target: Target, holds: Hypothesis) -> tuple[Edge, ...]:
    """Compare with the formula along each axis, the other branch at 1.5."""
    return _edges(target, holds, TAILS)


def limits(target: Target, holds: Hypothesis) -> tuple[Edge, ...]:
    """Compare with the formula's limits at ±∞, its values at ± the largest number, and NaN at NaN."""
    return _edges(target, holds, _LIMITS)


def lost(edges: tuple[Edge, ...]) -> str:
    """Return in words what disagrees: one sentence for each axis, "" where all agree."""
    found = []
    for i, name in enumerate(("g", "u") if edges and len(edges[0].at) == 2 else ("x",)):
        axis = [e for e in edges if not e.agrees and (len(e.at) == 1 or e.at[1 - i] == 1.5)]
        if axis:
            axis.sort(key=lambda e: abs(e.at[i]))
            found.append(", ".join(f"{_got(e)} at {name} = {e.at[i]:.3g}" for e in axis[:3]))
    return "; ".join(found)


def _got(edge: Edge) -> str:
    if math.isfinite(edge.truth) and math.isfinite(edge.got) and edge.got != 0:
        off = abs(edge.got / edge.truth - 1) if edge.truth else math.inf
        return f"{100 * off:.2g} % off"
    return f"{edge.got + 0.0:.3g} for {edge.truth + 0.0:.3g}"  # no −0


def _edges(target: Target, holds: Hypothesis, values: tuple[float, ...]) -> tuple[Edge, ...]:
    args = tuple(a.float() for a in along(values, target.n_inputs))
    with torch.no_grad():
        got, truth = target(args), holds(tuple(a.double() for a in args))
    found = []
    for k, (y, t) in enumerate(zip(got.flatten().tolist(), truth.flatten().tolist(), strict=True)):
        found.append(Edge(tuple(a.flatten()[k].item() for a in args), y, t, _agree(y, t)))
    return tuple(found)


def _agree(got: float, truth: float) -> bool:
    if math.isnan(truth):
        return math.isnan(got)
    if abs(truth) > _LARGE:
        return got == math.copysign(math.inf, truth) or abs(got) > 0.99 * _LARGE
    return abs(got - truth) <= _TAIL * abs(truth) + torch.finfo(torch.float32).smallest_normal
