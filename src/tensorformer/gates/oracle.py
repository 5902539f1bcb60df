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


def _erfc(z: Any) -> Any:
    """mpmath's own, and past its range the leading term, of a number below 1e-4000000000."""
    return mpmath.exp(-z * z) / (z * mpmath.sqrt(mpmath.pi)) if z > 1e5 else mpmath.erfc(max(z, mpmath.mpf(-1e5)))


@functools.lru_cache(maxsize=512)
def _function(formula: str, names: tuple[str, ...], order: int) -> Any:
    expr = ex.parse(formula, names)
    for _ in range(order):
        expr = ex.derivative(expr, "x")
    return sympy.lambdify([ex.x, *map(ex.symbol, names)], expr.doit(), [{"erfc": _erfc}, "mpmath"])


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
    if math.isnan(x):
        return mpmath.nan
    last = None
    # A difference can cancel to any depth, to nothing as well: more digits until two answers agree.
    for guard in (10, 40, 160, 640):
        with mpmath.workdps(digits + guard):
            value = _at(formula, names, [mpmath.mpf(p) for p in parameters], limits, x, order)
            if last is not None and value != 0 and abs(value - last) <= abs(value) * mpmath.mpf(10) ** -digits:
                break
            last = value
    with mpmath.workdps(digits):
        return +value


def _at(formula: str, names: tuple[str, ...], values: list[Any], limits: tuple[str, str], x: float, order: int) -> Any:
    if not math.isinf(x):
        return mpmath.mpf(_function(formula, names, order)(mpmath.mpf(x), *values))
    if order == 0:
        return mpmath.mpf(_function(limits[x > 0], names, 0)(mpmath.mpf(0), *values))
    # Far out a derivative has reached its limit to every digit, or it grows from one point to the next.
    near, far = (mpmath.mpf(_function(formula, names, order)(mpmath.sign(x) * mpmath.mpf(p), *values)) for p in _FAR)
    if abs(far) > 2 * abs(near):
        return mpmath.sign(far) * mpmath.inf
    return far if abs(far) > mpmath.eps else mpmath.mpf(0)


@functools.lru_cache(maxsize=512)
def second_moment(formula: str, names: tuple[str, ...], parameters: tuple[float, ...]) -> float:
    """Return E[f(z)²], z ~ N(0, 1)."""
    from scipy.integrate import quad

    function = kernel(formula, ("x", *names))

    def integrand(z: float) -> float:
        # On the CPU whatever the default device: a model is initialised under torch.device("meta") as well.
        value = function.value(torch.tensor(z, dtype=torch.float64, device="cpu"), *parameters).item()
        return value * value * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    # Unit panels: adaptive quadrature then finds kinks (of clips and ReLUs) wherever they are. Past 14 the
    # density is below 1e-43.
    return float(sum(quad(integrand, k, k + 1, epsabs=1e-13, epsrel=1e-11)[0] for k in range(-14, 14)))
