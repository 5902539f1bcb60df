"""From an expression to source text: torch for running, Triton for kernels.

Both refuse what they do not know. SymPy's own printers would write ``math.tanh`` and let a kernel find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from tensorformer.errors import GateError
from tensorformer.gates import expr as ex
from tensorformer.gates.expr import Expr


class _Marker(sympy.Function):
    """A function only the printers know: SymPy leaves it as it is."""

    if TYPE_CHECKING:

        def __new__(cls, *args: Any) -> Any: ...


class finite(_Marker):
    """Its argument, brought back from ±∞ to the largest finite number: put on the partner of a vanishing factor."""


class floored(_Marker):
    """Its argument, with −∞ brought back to the lowest finite number; +∞ stays."""


class select(_Marker):
    """select(a, b, p, q): p where a < b, else q."""


class square(_Marker):
    """z², left whole: SymPy would write (x/β)² as x²/β², which overflows where the quotient does not."""


def guarded(expr: Expr) -> Expr:
    """Mark each unbounded factor that meets a vanishing one, so that ∞·0 gives the limit, zero, and not NaN."""
    if not expr.args:
        return expr
    expr = expr.func(*(guarded(a) for a in expr.args))
    if not expr.is_Mul:
        return expr
    kinds = {f.vanishing for f in expr.args if isinstance(f, ex.Primitive)}
    guard = finite if "both" in kinds else floored if "left" in kinds else None
    wild = [f for f in expr.args if ex.is_unbounded(f)]
    if guard is None or not wild:
        return expr
    # Numbers and parameters go inside the guard: outside, 2·max would be infinite again.
    tame = [f for f in expr.args if isinstance(f, ex.Primitive) and f.bounded]
    return sympy.Mul(guard(sympy.Mul(*(f for f in expr.args if f not in tame))), *tame)


class _Printer:
    """Writes one expression with one backend's spelling of each function."""

    def __init__(self, spelling: Mapping[str, str], backend: str) -> None:
        self.spelling, self.backend = spelling, backend

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
            raise GateError(f"no {self.backend} form of {name!r} in {expr}: add it to gates/printers.py")
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
        above = [a for a in expr.args if not _is_inverse(a)]
        below = [1 / a for a in expr.args if _is_inverse(a)]
        numbers = sympy.Mul(*(a for a in above if a.is_number))
        factors = [self(a) for a in above if not a.is_number]
        factors = ([self(numbers)] if numbers != 1 or not factors else []) + factors
        text = "*".join(factors) + "".join(f"/{self(b)}" for b in below)
        return f"({text})"

    def _power(self, base: Expr, exponent: Any) -> str:
        whole = int(exponent) if exponent.is_Integer else None
        if exponent == sympy.Rational(1, 2) and "sqrt" in self.spelling:
            return self.spelling["sqrt"].format(self(base))
        if whole == 2 and "square" in self.spelling and not base.is_Symbol:
            return self.spelling["square"].format(self(base))
        if whole is not None and 0 < whole <= 8:
            return "(" + "*".join([self(base)] * whole) + ")"
        if whole is not None and whole < 0:
            return f"(1.0/{self(base**-whole)})"
        raise GateError(f"no {self.backend} form of the power {base}**{exponent}")


def _is_inverse(factor: Any) -> bool:
    return bool(factor.is_Pow and not factor.is_number and factor.exp.is_Integer and factor.exp < 0)


# `above` and `within` go through sign: torch's comparisons and `where` on CPU cost ten times as much.
# fmt: off
_TORCH = _Printer({
    "square": "torch.square({0})", "sigmoid": "torch.sigmoid({0})", "tanh": "torch.tanh({0})", "exp": "torch.exp({0})",
    "hump": "({0}*(1.0 - {0}))", "dome": "(1.0 - {0}*{0})",
    "Phi": "(0.5*torch.erfc(-0.7071067811865476*{0}))", "gauss": "(0.3989422804014327*torch.exp(-0.5*({0}*{0})))",
    "relu": "torch.relu({0})", "cap": "torch.clamp({0}, max={1})", "clip": "torch.clamp({0}, {1}, {2})",
    "above": "torch.sign(torch.relu({0} - {1}))",
    "within": "(1.0 - torch.sign({0} - torch.clamp({0}, {1}, {2})).abs())",
    "finite": "torch.clamp({0}, -top, top)", "floored": "torch.clamp({0}, min=-top)",
}, "torch")
# fmt: on

# Triton's maximum, minimum and clamp drop NaN unless told not to. tanh and Φ are expanded before printing.
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_TOP = "3.4028234663852886e+38"
# fmt: off
_TRITON = _Printer({
    "square": "({0}*{0})", "sigmoid": "tl.sigmoid({0})", "exp": "tl.exp({0})", "Abs": "tl.abs({0})",
    "hump": "({0}*(1.0 - {0}))", "dome": "(1.0 - {0}*{0})",
    "gauss": "(0.3989422804014327*tl.exp(-0.5*({0}*{0})))",
    "relu": f"tl.maximum({{0}}, 0.0, {_NAN})", "cap": f"tl.minimum({{0}}, {{1}}, {_NAN})",
    "clip": f"tl.minimum(tl.maximum({{0}}, {{1}}, {_NAN}), {{2}}, {_NAN})",
    "above": "tl.where({0} > {1}, 1.0, 0.0)", "within": "tl.where(({0} >= {1}) & ({0} <= {2}), 1.0, 0.0)",
    "select": "tl.where({0} < {1}, {2}, {3})",
    "finite": f"tl.minimum(tl.maximum({{0}}, -{_TOP}, {_NAN}), {_TOP}, {_NAN})",
    "floored": f"tl.maximum({{0}}, -{_TOP}, {_NAN})",
}, "Triton")
# fmt: on


def _numeric(expr: Expr) -> Expr:
    """Turn √(2/π) and the like into one number each, in more digits than a double has."""
    return expr.replace(lambda e: e.is_number and not e.is_Number, lambda e: sympy.N(e, 30)) if expr.args else expr


def _shared(exprs: list[Expr], prefix: str) -> Any:
    """Name the common parts: pairs of a temporary and its expression, then the expressions that are left."""
    return sympy.cse(exprs, symbols=sympy.numbered_symbols(prefix), order="none")


def torch_source(expr: Expr, names: Sequence[str]) -> str:
    """Return the source of ``value(*names)``, which computes ``expr`` on tensors of one floating dtype."""
    temporaries, (result,) = _shared([guarded(_numeric(expr))], "t")
    lines = [f"def value({', '.join(names)}):"]
    body = [f"    {t} = {_TORCH(e)}" for t, e in temporaries] + [f"    return {_TORCH(result)}"]
    if any("top" in line for line in body):
        lines.append(f"    top = torch.finfo({names[0]}.dtype).max")
    return "\n".join(lines + body) + "\n"


def triton_lines(outputs: Mapping[str, Expr], temporary: str) -> list[str]:
    """Return the lines that assign each output, common parts computed once.

    Args:
        outputs: the name of a variable to each expression; float32 values under the expressions' own symbols.
        temporary: the prefix of the names of intermediate values.
    """
    expanded = [_numeric(_expand_for_triton(guarded(e))) for e in outputs.values()]
    temporaries, results = _shared(expanded, temporary)
    assigned = [*temporaries, *zip(outputs, results, strict=True)]
    return [f"{name} = {_TRITON(e)}" for name, e in assigned]


def _expand_for_triton(expr: Expr) -> Expr:
    return expr.replace(ex.tanh, _triton_tanh).replace(ex.Phi, _triton_phi)


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


def _horner(coefficients: Sequence[float], t: Expr) -> Expr:
    total = sympy.Float(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = sympy.Float(c) + t * total
    return total


def _triton_phi(z: Expr) -> Expr:
    """Φ by its tail, with relative accuracy: Triton itself has only erf, which loses it."""
    t = 1 / (1 + sympy.Abs(z) / (2 * sympy.sqrt(2)))
    tail = t * sympy.exp(-square(z) / 2 + _horner(_PHI, t)) / 2
    return select(z, sympy.Integer(0), tail, 1 - tail)


def _triton_tanh(z: Expr) -> Expr:
    """Tanh from exp, and from a polynomial near zero, where 1 − 2/(1 + e^2z) has no digits: Triton has none."""
    size, z2 = sympy.Abs(z), square(z)
    near = z * (1 + z2 * _horner(_TANH, z2))
    far = 1 - 2 / (1 + sympy.exp(2 * size))
    return select(size, sympy.Float(0.63), near, select(z, sympy.Integer(0), -far, far))
