"""What every printer shares: guards against ∞·0, common parts, and the walk through an expression.

A backend is a table of spellings (``torch_source.py``, ``triton_source.py``, …). Each refuses what it does not know:
SymPy's own printers would write ``math.tanh`` and let a kernel find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy

from tensorformer.errors import GateError
from tensorformer.gates import expr as ex
from tensorformer.gates.expr import Expr


class Marker(sympy.Function):
    """A function only the printers know: SymPy leaves it as it is."""

    if TYPE_CHECKING:

        def __new__(cls, *args: Any) -> Any: ...


class finite(Marker):
    """Its argument, brought back from ±∞ to the largest finite number: put on the partner of a vanishing factor."""


class floored(Marker):
    """Its argument, with −∞ brought back to the lowest finite number; +∞ stays."""


class square(Marker):
    """z², left whole: SymPy would write (x/β)² as x²/β², which overflows where the quotient does not."""


def guarded(expr: Expr) -> Expr:
    """Mark each unbounded factor that meets a vanishing one, so that ∞·0 gives the limit, zero, and not NaN."""
    if not expr.args:
        return expr
    expr = expr.func(*(guarded(a) for a in expr.args))
    if not expr.is_Mul:
        return expr
    kinds = {_vanishing(f) for f in expr.args}
    guard = finite if "both" in kinds else floored if "left" in kinds else None
    wild = [f for f in expr.args if ex.is_unbounded(f)]
    if guard is None or not wild:
        return expr
    # Numbers and parameters go inside the guard: outside, 2·max would be infinite again.
    tame = [f for f in expr.args if _vanishing(f) is not None and not ex.is_unbounded(f)]
    inner = sympy.Mul(*(f for f in expr.args if f not in tame))
    if guard is floored and inner.is_polynomial(ex.x) and ex.degree(inner) in (2, 4, 6, 8):
        guard = finite  # +∞ on the left as well
    return sympy.Mul(guard(inner), *tame)


def _vanishing(factor: Any) -> ex.Vanishing | None:
    """Say where a factor vanishes; None where it is not one that guards are built around."""
    if factor.is_Pow and factor.exp.is_Integer and factor.exp > 0:
        return _vanishing(factor.base)
    if isinstance(factor, sympy.exp) and factor.has(ex.positive):
        return "both"  # a power of something that may be as small as numbers go
    return factor.vanishing if isinstance(factor, ex.Primitive) else None


class Printer:
    """Writes one expression with one backend's spelling of each function."""

    def __init__(self, spelling: Mapping[str, str], backend: str, module: str) -> None:
        self.spelling, self.backend, self.module = spelling, backend, module

    def __call__(self, expr: Expr) -> str:
        if expr.is_number:
            return repr(float(expr))
        if expr.is_Symbol:
            return str(expr)
        if expr.is_Add:
            return self._sum(expr)
        if expr.is_Mul:
            return self._product(expr)
        if expr.is_Pow:
            return self._power(*expr.as_base_exp())
        name = type(expr).__name__
        if name not in self.spelling:
            raise GateError(f"no {self.backend} form of {name!r} in {expr}: add its spelling to gates/{self.module}.py")
        return self.spelling[name].format(*(self(a) for a in expr.args))

    def _sum(self, expr: Expr) -> str:
        # Variables first: a tensor on the left lets torch take the number as a scalar operand.
        first, *rest = sorted(expr.args, key=lambda a: (a.is_number, a.could_extract_minus_sign()))
        text = self(first)
        for term in rest:
            negative = term.could_extract_minus_sign()
            text += f" - {self(-term)}" if negative else f" + {self(term)}"
        return f"({text})"

    def _product(self, expr: Expr) -> str:
        if expr.args[0] == -1:
            return f"(-{self(sympy.Mul(*expr.args[1:]))})"
        above = [a for a in expr.args if not is_inverse(a)]
        below = [1 / a for a in expr.args if is_inverse(a)]
        numbers = sympy.Mul(*(a for a in above if a.is_number))
        factors = [self(a) for a in above if not a.is_number]
        factors = ([self(numbers)] if numbers != 1 or not factors else []) + factors
        text = "*".join(factors) + "".join(f"/{self(b)}" for b in below)
        return f"({text})"

    def _power(self, base: Expr, exponent: Any) -> str:
        if exponent.is_Integer and int(exponent) == 2 and "square" in self.spelling and not base.is_Symbol:
            return self.spelling["square"].format(self(base))
        if exponent.is_Rational and exponent < 0:
            return f"({self(sympy.S.One)}/{self(base**-exponent)})"
        if exponent.is_Integer and exponent <= 8:
            return "(" + "*".join([self(base)] * int(exponent)) + ")"
        if exponent.is_Rational and exponent.q == 2 and exponent <= 8 and "sqrt" in self.spelling:
            root = self.spelling["sqrt"].format(self(base))
            whole = exponent - sympy.Rational(1, 2)
            return root if whole == 0 else f"({root}*{self(base**whole)})"
        raise GateError(f"no {self.backend} form of the power {base}**{exponent}")


def is_inverse(factor: Any) -> bool:
    """Say whether a factor is 1 over something that varies."""
    return bool(factor.is_Pow and not factor.is_number and factor.exp.is_Rational and factor.exp < 0)


def numeric(expr: Expr) -> Expr:
    """Turn √(2/π) and the like into one number each, in more digits than a double has."""
    return expr.replace(lambda e: e.is_number and not e.is_Number, lambda e: sympy.N(e, 30)) if expr.args else expr


def shared(exprs: list[Expr], prefix: str) -> Any:
    """Name the common parts: pairs of a temporary and its expression, then the expressions that are left."""
    return sympy.cse(exprs, symbols=sympy.numbered_symbols(prefix), order="none")
