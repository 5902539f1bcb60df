"""Functions a kernel language lacks, in terms of exp alone and good to float32: Φ, tanh, expm1, softplus."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from tensorformer.gates import expr as ex
from tensorformer.gates.expr import Expr
from tensorformer.gates.printing import square


def by_exp(expr: Expr) -> Expr:
    """Return ``expr`` with those functions replaced; the error of each is below that of a float32 exp."""
    for primitive, replacement in ((ex.softplus, _softplus), (ex.expm1, _expm1), (ex.tanh, _tanh), (ex.Phi, _phi)):
        expr = expr.replace(primitive, replacement)
    return expr


# log(erfc(a)·e^(a²)/t) at a = 2/t − 2, t in (0, 1]: Chebyshev interpolation of the 40-digit function, error 3e-8.
_PHI = (
    -1.26551221,
    1.000020943,
    0.3741760882,
    0.09577241228,
    -0.1800615126,
    0.2567150685,
    -1.086955622,
    1.423171949,
    -0.7684580888,
    0.146361386,
    0.004769650675,
)
# (tanh(z)/z − 1)/z² in z², |z| < 0.63: the same way, error 2e-8.
_TANH = (-0.333333284, 0.133327188, -0.0538432632, 0.0209613291, -0.00604516509)
# atanh(s)/s in s², s ≤ 1/3: its Taylor series, whose next term is 1e-9.
_ATANH = tuple(1 / (2 * k + 1) for k in range(9))


def _horner(coefficients: Sequence[float], t: Expr) -> Expr:
    total = sympy.Float(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = sympy.Float(c) + t * total
    return total


def _phi(z: Expr) -> Expr:
    """Φ by its tail, with relative accuracy: from erf it would be lost."""
    t = 1 / (1 + sympy.Abs(z) / (2 * sympy.sqrt(2)))
    tail = t * sympy.exp(-square(z) / 2 + _horner(_PHI, t)) / 2
    return ex.select(z, sympy.Integer(0), tail, 1 - tail)


def _tanh(z: Expr) -> Expr:
    """Tanh from exp, and from a polynomial near zero, where 1 − 2/(1 + e^2z) has no digits."""
    size, z2 = sympy.Abs(z), square(z)
    near = z * (1 + z2 * _horner(_TANH, z2))
    far = 1 - 2 / (1 + sympy.exp(2 * size))
    return ex.select(size, sympy.Float(0.63), near, ex.select(z, sympy.Integer(0), -far, far))


def _expm1(z: Expr) -> Expr:
    """(e^z + 1)·tanh(z/2), which cancels nothing."""
    return (sympy.exp(z) + 1) * ex.tanh(z / 2)


def _softplus(z: Expr) -> Expr:
    """max(0, z) + log(1 + e^−|z|), the logarithm as 2·atanh(t/(2 + t))."""
    t = sympy.exp(-sympy.Abs(z))
    s = t / (2 + t)
    return ex.relu(z) + 2 * s * _horner(_ATANH, square(s))
