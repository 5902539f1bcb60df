"""Numbers found by least squares: by trying sizes, then by Gauss and Newton; by halving, where a formula jumps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.study.numerics_changes import Free, Values

_STEP = 0.5
_FAR = 6  # steps: from a twentieth to twenty times
_HALVINGS = 20
_HOPELESS = 0.1  # mean square, of a size of 1
_NOTHING = 1e-24

Residual = Callable[[Any], Tensor]


def fit(free: Free, some: Residual, every: Residual) -> tuple[Values, Any] | None:
    """Return the numbers, and the formula made with them, that make the residual least; None where nothing comes near.

    Args:
        free: what is left to find.
        some: the residual of a formula at a few points, enough to find a number that moves the outputs smoothly.
        every: at all points, for one that does not, such as a threshold.
    """
    few = _Problem(free, some)
    best = few.tried()
    if not few.cost(best) < _HOPELESS:
        return None
    if few.cost(best) > _NOTHING:
        best = few.solved(best)
    if "select" in str(few.made(best).expr):
        best = _Problem(free, every).halved(best)
    return few.numbers(best), few.made(best)


@final
@dataclass(frozen=True)
class _Problem:
    """The steps t from the first numbers; 0 leaves one as it is."""

    free: Free
    residual: Residual

    def numbers(self, t: Values) -> Values:
        """As many times the first number as eᵗ, or, where its sign is open, as much more as t."""
        start = self.free.start
        return {n: start[n] + t[n] if n in self.free.signed else start[n] * math.exp(t[n]) for n in t}

    def made(self, t: Values) -> Any:
        return self.free.make(self.numbers(t))

    def errors(self, t: Values) -> np.ndarray:
        try:
            found = self.residual(self.made(t)).nan_to_num(nan=1e3, posinf=1e3, neginf=-1e3).clamp(-1e3, 1e3)
        except (GateError, OverflowError):  # a number out of its range
            return np.full(1, 1e3)
        return found.flatten().numpy()

    def cost(self, t: Values) -> float:
        return float(np.mean(np.square(self.errors(t))))

    def tried(self) -> Values:
        """The best of a grid, one number at a time."""
        best = dict.fromkeys(self.free.start, 0.0)
        least = self.cost(best)
        for _ in range(1 if len(best) == 1 else 2):
            for name in best:
                for k in range(-_FAR, _FAR + 1):
                    t = best | {name: k * _STEP}
                    cost = self.cost(t)
                    if cost < least:
                        least, best = cost, t
        return best

    def solved(self, t: Values) -> Values:
        from scipy.optimize import least_squares

        names, reach = list(t), [math.inf if n in self.free.signed else _STEP * _FAR + 1 for n in t]
        found = least_squares(
            lambda v: self.errors(dict(zip(names, v, strict=True))),
            [t[n] for n in names],
            bounds=([-r for r in reach], reach),
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=40,
        )
        return dict(zip(names, map(float, found.x), strict=True))

    def halved(self, t: Values) -> Values:
        """Where outputs jump no slope leads on: step to either side while that helps, then half as far."""
        best, least = t, self.cost(t)
        for k in range(_HALVINGS if least > _NOTHING else 0):
            for name in t:
                for side in (-1, 1):
                    tried = best | {name: best[name] + side * _STEP / 2**k}
                    cost = self.cost(tried)
                    if cost < least:
                        least, best = cost, tried
        return best
