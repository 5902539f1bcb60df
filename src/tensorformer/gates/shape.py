"""What can be read off a formula: how smooth it is, between which bounds it stays, and what it costs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import sympy
import torch

from tensorformer.gates import expr as ex
from tensorformer.gates.expr import Expr
from tensorformer.gates.kernel import kernel
from tensorformer.gates.printing import numeric, shared

_REACH = 64.0  # kinks are looked for as far as this
_FAR = 1e12  # and extremes as far as this
_DERIVATIVES = 5


@functools.lru_cache(maxsize=256)
def smoothness(formula: str, names: tuple[str, ...], parameters: tuple[float, ...]) -> int | None:
    """Return k if the k-th derivative is the last continuous one, −1 if the function jumps, None if all are."""
    expr = ex.parse(formula, names)
    with mpmath.workdps(60):
        values = [mpmath.mpf(p) for p in parameters]
        kinks = [point for difference in _switches(expr) for point in _roots(_evaluator(difference, names), values)]
        for order in range(_DERIVATIVES):
            function = _evaluator(expr, names)
            if any(_jumps(function, values, point) for point in kinks):
                return order - 1
            expr = ex.derivative(expr, "x")
    return None


def _jumps(function: Callable[..., Any], values: list[Any], point: Any) -> bool:
    step = mpmath.mpf(10) ** -25
    left, right = (function(point + side * step, *values) for side in (-1, 1))
    return bool(abs(left - right) > mpmath.mpf(10) ** -15 * (1 + abs(left)))


def _evaluator(expr: Expr, names: tuple[str, ...]) -> Callable[..., Any]:
    modules = [{"erfc": mpmath.erfc}, "mpmath"]
    return sympy.lambdify([ex.x, *map(ex.symbol, names)], expr.doit(), modules)


def _switches(expr: Expr) -> Iterator[Expr]:
    """Yield differences that are zero where a piecewise part of the expression goes from one piece to the next."""
    for part in expr.atoms(ex.Primitive):
        first, *rest = part.args
        if isinstance(part, ex.relu):
            yield first
        elif isinstance(part, ex.cap | ex.clip):
            yield from (first - edge for edge in rest)
        elif isinstance(part, ex.select):
            yield first - rest[0]


def _roots(function: Callable[..., Any], values: list[Any]) -> Iterator[Any]:
    points = [mpmath.mpf(i) / 4 for i in range(int(-4 * _REACH), int(4 * _REACH) + 1)]
    signs = [mpmath.sign(function(p, *values)) for p in points]
    for a, b, left, right in zip(points, points[1:], signs, signs[1:], strict=False):
        if left == 0:
            yield a
        elif left * right < 0:
            yield mpmath.findroot(lambda x: function(x, *values), (a, b), solver="anderson", tol=1e-100)


@functools.lru_cache(maxsize=256)
def image(
    formula: str, names: tuple[str, ...], parameters: tuple[float, ...], ends: tuple[float, ...]
) -> tuple[float, float]:
    """Return the infimum and the supremum, of which ``ends``, the limits at ±∞, may be one."""
    from scipy.optimize import minimize_scalar

    function = kernel(formula, ("x", *names))

    def value(x: Any) -> Any:
        return function.value(torch.as_tensor(x, dtype=torch.float64, device="cpu"), *parameters)

    right = torch.cat([torch.linspace(0, _REACH, int(128 * _REACH)), torch.logspace(math.log10(_REACH), 12, 8192)])
    points = torch.cat([-right.flip(0), right[1:]]).double().clamp(-_FAR, _FAR)
    found = []
    for sign in (1.0, -1.0):
        values = sign * value(points)
        i = int(values.argmin())
        between = float(points[max(0, i - 1)]), float(points[min(len(points) - 1, i + 1)])
        best = minimize_scalar(
            lambda x, s=sign: s * float(value(x)), bounds=between, method="bounded", options={"xatol": 1e-9}
        )
        lowest = min(float(values.min()), float(best.fun), *(sign * e for e in ends))
        # The limit is the bound unless the search goes below it by more than its own error.
        nearest = min((sign * e for e in ends), key=lambda e: abs(e - lowest))
        close = math.isfinite(nearest) and abs(nearest - lowest) <= 1e-12 * (1 + abs(nearest))
        found.append(sign * (nearest if close else lowest))
    return found[0], found[1]


_COSTS = {
    "sigmoid": ("exp", "add", "div"),
    "tanh": ("tanh",),
    "Phi": ("erfc", "mul", "mul"),
    "gauss": ("exp", "mul", "mul", "mul"),
    "hump": ("add", "mul"),
    "dome": ("mul", "add"),
    "relu": ("max",),
    "cap": ("min",),
    "clip": ("max", "min"),
    "above": ("select",),
    "within": ("select", "select"),
    "select": ("select",),
    "expm1": ("expm1",),
    "softplus": ("exp", "log", "max", "add"),
    "exp": ("exp",),
    "log": ("log",),
    "positive": (),
}


def cost(expr: Expr) -> dict[str, int]:
    """Return how many operations of each kind one element costs; what only parameters enter costs nothing."""
    temporaries, results = shared([numeric(expr)], "t")
    total: Counter[str] = Counter()
    own = {ex.x, ex.g, ex.u} | {t for t, _ in temporaries}
    for part in [*(e for _, e in temporaries), *results]:
        for node in sympy.preorder_traversal(part):
            if node.args and node.free_symbols & own:
                total.update(_operations(node, own))
    return dict(sorted(total.items()))


def _operations(node: Any, own: set[Any]) -> tuple[str, ...]:
    if node.is_Add:
        return ("add",) * (len(node.args) - 1)
    if node.is_Mul:
        # A sign is free, a quotient is one division, and factors of parameters are one number.
        below = sum(1 for a in node.args if a.is_Pow and not a.is_number and a.exp.is_negative)
        varying = [a for a in node.args if a.free_symbols & own]
        constant = any(a != -1 and not a.free_symbols & own for a in node.args)
        return ("div",) * below + ("mul",) * max(0, len(varying) + constant - 1 - below)
    if node.is_Pow:
        root = ("sqrt",) if not node.exp.is_Integer else ()
        return root + ("mul",) * max(0, int(abs(node.exp)) - 1)
    return _COSTS[type(node).__name__]
