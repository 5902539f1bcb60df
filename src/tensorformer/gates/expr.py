"""The symbols, and the functions that formulas are made of: each declared once, with its derivative.

A primitive has a *definition* in elementary functions (the 50-digit oracle evaluates that), a *derivative* in
primitives, a LaTeX form, and, for the printers, what it does far out: whether it is bounded, and where it vanishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import sympy
from sympy.parsing.sympy_parser import auto_number, parse_expr, rationalize

from tensorformer.errors import GateError

# A sympy.Expr. SymPy's own annotations do not survive its operators.
Expr = Any
# "both": zero, in floating point exactly, towards either infinity; "left": towards −∞ only.
Vanishing = Literal["both", "left", "never"]


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a variable or a parameter."""
    return sympy.Symbol(name, real=True)


x, g, u = symbol("x"), symbol("g"), symbol("u")


# Not sympy.erfc, which turns erfc(−z) into 2 − erfc(z) and so loses, at z = 16, all but nine of fifty digits.
erfc: Any = sympy.Function("erfc")


class Primitive(sympy.Function):
    """A scalar function with a declared definition, derivative, LaTeX form and behaviour far out."""

    bounded: ClassVar[bool] = True
    vanishing: ClassVar[Vanishing] = "never"
    pattern: ClassVar[str]  # LaTeX, with {0}, {1}, … for the arguments
    definition: Any  # (*args) -> the same function in elementary terms
    slopes: Any  # (*args) -> its partial derivative by each of them

    if TYPE_CHECKING:

        def __new__(cls, *args: Any) -> Any: ...

    def fdiff(self, argindex: int = 1) -> Expr:
        return self.slopes(*self.args)[argindex - 1]

    def doit(self, **hints: Any) -> Expr:
        return self.definition(*(a.doit(**hints) for a in self.args))

    def _latex(self, printer: Any, exp: str | None = None) -> str:
        text = self.pattern.format(*(printer.doprint(a) for a in self.args))
        return text if exp is None else rf"\left({text}\right)^{{{exp}}}"


class sigmoid(Primitive):
    """σ(z) = 1 / (1 + e⁻ᶻ)."""

    vanishing = "left"
    pattern = r"\sigma\left({0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return 1 / (1 + sympy.exp(-z))

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (hump(sigmoid(z)),)


class hump(Primitive):
    """s(1 − s), the logistic density, as a function of s = σ(z) so that both share one exponential."""

    vanishing = "both"
    pattern = r"{0} \left(1 - {0}\right)"

    @staticmethod
    def definition(s: Expr) -> Expr:
        return s * (1 - s)

    @staticmethod
    def slopes(s: Expr) -> tuple[Expr, ...]:
        return (1 - 2 * s,)


class tanh(Primitive):
    """The hyperbolic tangent."""

    pattern = r"\tanh\left({0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return sympy.tanh(z)

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (dome(tanh(z)),)


class dome(Primitive):
    """1 − t², the squared hyperbolic secant, as a function of t = tanh(z)."""

    vanishing = "both"
    pattern = r"\left(1 - {0}^2\right)"

    @staticmethod
    def definition(t: Expr) -> Expr:
        return 1 - t**2

    @staticmethod
    def slopes(t: Expr) -> tuple[Expr, ...]:
        return (-2 * t,)


class Phi(Primitive):
    """Φ(z) = ½ erfc(−z/√2), the standard normal distribution function; ½(1 + erf) would lose its left tail."""

    vanishing = "left"
    pattern = r"\Phi\left({0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return erfc(-z / sympy.sqrt(2)) / 2

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (gauss(z),)


class gauss(Primitive):
    """φ(z) = e^(−z²/2) / √(2π), the standard normal density."""

    vanishing = "both"
    pattern = r"\varphi\left({0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return sympy.exp(-(z**2) / 2) / sympy.sqrt(2 * sympy.pi)

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (-z * gauss(z),)


class relu(Primitive):
    """max(0, z); its slope at the kink is 0, as in torch."""

    bounded = False
    pattern = r"\max\left(0, {0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return sympy.Piecewise((z, z > 0), (0, True))

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (above(z, 0),)


class cap(Primitive):
    """min(z, top); at the kink the slope by z is 1, as in ``torch.clamp``."""

    bounded = False
    pattern = r"\min\left({0}, {1}\right)"

    @staticmethod
    def definition(z: Expr, top: Expr) -> Expr:
        return sympy.Piecewise((top, z > top), (z, True))

    @staticmethod
    def slopes(z: Expr, top: Expr) -> tuple[Expr, ...]:
        return 1 - above(z, top), above(z, top)


class clip(Primitive):
    """min(max(z, low), high); at a kink the slope by z is 1, as in ``torch.clamp``."""

    vanishing = "left"  # where low is 0; elsewhere the guard it asks for changes nothing
    pattern = r"\mathrm{{clip}}\left({0}, {1}, {2}\right)"

    @staticmethod
    def definition(z: Expr, low: Expr, high: Expr) -> Expr:
        return sympy.Piecewise((low, z < low), (high, z > high), (z, True))

    @staticmethod
    def slopes(z: Expr, low: Expr, high: Expr) -> tuple[Expr, ...]:
        return within(z, low, high), above(low, z), above(z, high)


class above(Primitive):
    """[a > b], 1 or 0; its own slope counts as zero, which it is almost everywhere."""

    pattern = r"\left[{0} > {1}\right]"

    @staticmethod
    def definition(a: Expr, b: Expr) -> Expr:
        return sympy.Piecewise((1, a > b), (0, True))

    @staticmethod
    def slopes(a: Expr, b: Expr) -> tuple[Expr, ...]:
        return sympy.S.Zero, sympy.S.Zero


class within(Primitive):
    """[low ≤ z ≤ high], 1 or 0; its own slope counts as zero."""

    vanishing = "both"
    pattern = r"\left[{1} \le {0} \le {2}\right]"

    @staticmethod
    def definition(z: Expr, low: Expr, high: Expr) -> Expr:
        return sympy.Piecewise((0, z < low), (0, z > high), (1, True))

    @staticmethod
    def slopes(z: Expr, low: Expr, high: Expr) -> tuple[Expr, ...]:
        return sympy.S.Zero, sympy.S.Zero, sympy.S.Zero


class select(Primitive):
    """p where a < b, else q; also where a or b is NaN."""

    bounded = False
    pattern = r"\begin{{cases}} {2} & {0} < {1} \\ {3} & \text{{otherwise}} \end{{cases}}"

    @staticmethod
    def definition(a: Expr, b: Expr, p: Expr, q: Expr) -> Expr:
        return sympy.Piecewise((p, a < b), (q, True))

    def _eval_derivative(self, s: Any) -> Expr:
        # Not by the chain rule: 0·p' + 1·q' is NaN where the branch not taken is infinite.
        a, b, p, q = self.args
        return select(a, b, sympy.diff(p, s), sympy.diff(q, s))

    @classmethod
    def eval(cls, *args: Any) -> Expr | None:
        return args[2] if args[2] == args[3] else None


class expm1(Primitive):
    """e^z − 1."""

    bounded = False
    pattern = r"\left(e^{{{0}}} - 1\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return sympy.exp(z) - 1

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (sympy.exp(z),)


class softplus(Primitive):
    """log(1 + e^z)."""

    bounded = False
    pattern = r"\log\left(1 + e^{{{0}}}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return sympy.log(1 + sympy.exp(z))

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (sigmoid(z),)


class positive(Primitive):
    """z where it is positive; elsewhere some positive number, so that a branch not taken has a logarithm."""

    pattern = r"{0}"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return z

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (sympy.S.One,)


_NAMES = {f.__name__: f for f in (sigmoid, tanh, Phi, relu, cap, clip, select, expm1, softplus, positive)} | {
    "x": x,
    "exp": sympy.exp,
    "log": sympy.log,
    "sqrt": sympy.sqrt,
    "pi": sympy.pi,
    "oo": sympy.oo,
}
_SYMPY = {"Integer": sympy.Integer, "Float": sympy.Float, "Rational": sympy.Rational}


# How parameters are written in the papers they come from.
_WRITTEN = {
    "linear_beta": r"\lambda",
    "limit": "L",
    "threshold": "T",
    "alpha_p": r"\alpha_p",
    "alpha_n": r"\alpha_n",
    "negative_slope": "a",
}


def latex(expr: Expr) -> str:
    """Return ``expr`` in LaTeX; a decimal is written as one, not as the fraction it is kept as."""
    expr = expr.replace(lambda e: e.is_Rational and e.q > 20 and abs(e) > 1e-4, lambda e: sympy.Float(e, 7))
    return sympy.latex(expr, symbol_names={symbol(n): text for n, text in _WRITTEN.items()})


def latex_product(left: Expr, right: Expr) -> str:
    """Return ``left``·``right`` in LaTeX, in that order."""
    return " ".join(rf"\left({latex(e)}\right)" if e.is_Add else latex(e) for e in (left, right))


def parse(formula: str, parameters: tuple[str, ...]) -> Expr:
    """Return the expression written in ``formula``.

    Args:
        formula: Python syntax in ``x``, the parameters, ``sqrt``, ``pi`` and the primitives; decimals are exact.
        parameters: the names it may use besides.

    Raises:
        GateError: a name in it is not known.
    """
    names = _NAMES | {p: symbol(p) for p in parameters}
    try:
        return sympy.sympify(parse_expr(formula, names, (auto_number, rationalize), dict(_SYMPY)))
    except NameError as error:
        raise GateError(f"formula {formula!r}: {error}; known: {', '.join(sorted(names))}") from None


def derivative(expr: Expr, name: str) -> Expr:
    """Return ∂expr/∂name in primitives."""
    slope = sympy.diff(expr, symbol(name))
    # max(0, z)·[z > 0] is max(0, z): one pass less for every squared ReLU.
    for step in slope.atoms(above):
        twin = relu(step.args[0])
        if step.args[1] == 0 and slope.has(twin):
            slope = slope.subs(step * twin, twin)
    return slope


def degree(expr: Expr) -> int | None:
    """Return the degree of ``expr`` as a polynomial in x, None where it is not one."""
    return int(sympy.Poly(expr, x).degree()) if expr.is_polynomial(x) else None


def is_unbounded(expr: Expr) -> bool:
    """Say whether ``expr`` can become infinite for an infinite variable (parameters are finite)."""
    if isinstance(expr, Primitive) and expr.bounded:
        return False
    if isinstance(expr, select):
        return any(is_unbounded(a) for a in expr.args[2:])
    if expr.is_Symbol:
        return expr in (x, g, u)
    if isinstance(expr, sympy.exp) and expr.has(positive):
        return False  # a power of a positive number, not of e
    if isinstance(expr, sympy.Pow) and expr.exp.is_negative and expr.has(positive):
        return True
    return any(is_unbounded(a) for a in expr.args)
