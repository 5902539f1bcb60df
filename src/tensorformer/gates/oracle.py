"""The formula in as many digits as asked, and its second moment under a normal law."""

from __future__ import annotations

import functools
import math
from typing import Any

import mpmath
import sympy
import torch

from tensorformer.gates import expr as ex
from tensorformer.gates.kernel import kernel

_FAR = ("1e40", "1e80")


@functools.lru_cache(maxsize=512)
def _function(formula: str, names: tuple[str, ...], order: int) -> Any:
    expr = ex.parse(formula, names)
    for _ in range(order):
        expr = ex.derivative(expr, "x")
    return sympy.lambdify([ex.x, *map(ex.symbol, names)], expr.doit(), "mpmath")


def evaluate(
    formula: str,
    names: tuple[str, ...],
    parameters: tuple[float, ...],
    limits: tuple[str, str],
    x: float,
    digits: int,
    order: int,
) -> Any:
    """Return the ``order``-th derivative of ``formula`` at ``x`` to ``digits`` digits, as an ``mpmath.mpf``."""
    with mpmath.workdps(digits + 15):
        values = [mpmath.mpf(p) for p in parameters]
        if math.isnan(x):
            return mpmath.nan
        if math.isinf(x) and order == 0:
            at = limits[x > 0]
            result = _function(at, names, 0)(mpmath.mpf(0), *values)
        elif math.isinf(x):
            # Far out a derivative has reached its limit to every digit, or it grows from one point to the next.
            near, far = (_function(formula, names, order)(mpmath.sign(x) * mpmath.mpf(p), *values) for p in _FAR)
            grows = abs(far) > 2 * abs(near)
            result = mpmath.sign(far) * mpmath.inf if grows else far if abs(far) > mpmath.eps else 0
        else:
            result = _function(formula, names, order)(mpmath.mpf(x), *values)
    with mpmath.workdps(digits):
        return +mpmath.mpf(result)


@functools.lru_cache(maxsize=512)
def second_moment(formula: str, names: tuple[str, ...], parameters: tuple[float, ...]) -> float:
    """Return E[f(z)²], z ~ N(0, 1)."""
    from scipy.integrate import quad

    function = kernel(formula, ("x", *names))

    def integrand(z: float) -> float:
        value = function.value(torch.tensor(z, dtype=torch.float64), *parameters).item()
        return value * value * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    # Unit panels: adaptive quadrature then finds kinks (of clips and ReLUs) wherever they are. Past 14 the
    # density is below 1e-43.
    return float(sum(quad(integrand, k, k + 1, epsabs=1e-13, epsrel=1e-11)[0] for k in range(-14, 14)))
