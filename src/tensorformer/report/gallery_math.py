"""Formulas as MathML, which a browser sets without a script or a font of ours."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable, Mapping
from html import escape

import sympy
from markupsafe import Markup

from tensorformer.gates import Gate, Scalar
from tensorformer.gates import expr as ex
from tensorformer.gates.printing import numeric

_TIMES = '<mo lspace="0" rspace="0.17em">&#x2062;</mo>'
_PRIME = '<mo lspace="0.05em" rspace="0">′</mo>'
_NAMES = {"pi": "<mi>π</mi>", "oo": "<mi>∞</mi>"}
_WORDS = {"sigmoid": "σ", "Phi": "Φ", "gauss": "φ", "relu": "max", "cap": "min"}
_SIGNS = {ast.Add: "+", ast.Sub: "−"}


def symbol(name: str) -> str:
    """Return a parameter as it is written in formulas, as MathML: ``alpha_p`` as α with the subscript p."""
    found = re.fullmatch(r"\\?([^\W_]+)(?:_\{?(\w+)\}?)?", ex.latex(ex.symbol(name)))
    base, below = found.groups() if found else (name, None)
    letter = f"<mi>{escape(_greek(base))}</mi>"
    return letter if below is None else f"<msub>{letter}<mi>{escape(_greek(below))}</mi></msub>"


def scalar(of: Scalar) -> Markup:
    """Return f(x) = …, the formula as it is declared."""
    return _block(f"<mi>f</mi>{_bracket('<mi>x</mi>')}<mo>=</mo>{written(of.formula)}")


def slope(of: Scalar) -> Markup:
    """Return f′(x) = …, as it was derived."""
    expr = of.derivative_expr
    # A fraction such as 8943/200000 was a decimal in the formula; 1/6 was not.
    expr = numeric(expr.replace(lambda e: e.is_Rational and e.q > 12, lambda e: sympy.Float(e, 30)))
    expr = expr.replace(lambda e: e.is_Float, lambda e: sympy.Float(e, 7))
    return _block(f"<mi>f</mi>{_PRIME}{_bracket('<mi>x</mi>')}<mo>=</mo>{written(str(expr))}")


def gate(of: Gate) -> Markup:
    """Return h(g, u) = φ(g)·ψ(u), both as they are declared."""
    factors = [
        _tight(ast.parse(formula, mode="eval").body, ast.Mult, {"x": f"<mi>{variable}</mi>"})
        for formula, variable in ((of.gate.formula, "g"), (of.value.formula, "u"))
    ]
    return _block(f"<mi>h</mi>{_bracket('<mi>g</mi><mo>,</mo><mi>u</mi>')}<mo>=</mo>{_TIMES.join(factors)}")


def inline(formula: str) -> Markup:
    """Return a formula to stand in a line of text."""
    return Markup(f"<math>{written(formula)}</math>")


def letter(name: str) -> Markup:
    """Return a parameter to stand in a line of text."""
    return Markup(f"<math>{symbol(name)}</math>")


def written(formula: str) -> str:
    """Return Python syntax as MathML: the order of terms and the decimals stay as they are."""
    return _row(ast.parse(formula, mode="eval").body, {})


def _block(inner: str) -> Markup:
    return Markup(f'<math display="block">{inner}</math>')


def _greek(name: str) -> str:
    try:
        return unicodedata.lookup(f"GREEK SMALL LETTER {name.replace('lambda', 'lamda')}")
    except KeyError:
        return name


def _row(node: ast.expr, names: Mapping[str, str]) -> str:
    return f"<mrow>{_inner(node, names)}</mrow>"


def _inner(node: ast.expr, names: Mapping[str, str]) -> str:
    match node:
        case ast.Constant(value=value):
            return _number(value)
        case ast.Name(id=name):
            return names.get(name) or _NAMES.get(name) or symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f'<mo form="prefix">−</mo>{_tight(operand, ast.USub, names)}'
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return f"{_inner(left, names)}<mo>{_SIGNS[type(op)]}</mo>{_tight(right, type(op), names)}"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            sign = "<mo>·</mo>" if _begins_with_number(right) else _TIMES
            return f"{_tight(left, ast.Mult, names)}{sign}{_tight(right, ast.Mult, names)}"
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"<mfrac>{_row(left, names)}{_row(right, names)}</mfrac>"
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"<msup>{_tight(left, ast.Pow, names)}{_row(right, names)}</msup>"
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, arguments, names)
    raise ValueError(f"no MathML form of {ast.unparse(node)!r}")


def _begins_with_number(node: ast.expr) -> bool:
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow):
        node = node.left
    return isinstance(node, ast.Constant)


# Of each operation, what must stand in brackets inside it.
_LOOSE: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.USub,),
    ast.Sub: (ast.Add, ast.Sub, ast.USub),
    ast.Mult: (ast.Add, ast.Sub, ast.USub),
    ast.USub: (ast.Add, ast.Sub, ast.USub),
    ast.Pow: (ast.Add, ast.Sub, ast.USub, ast.Mult, ast.Div, ast.Pow),
}


def _tight(node: ast.expr, around: type, names: Mapping[str, str]) -> str:
    inner = _row(node, names)
    loose = isinstance(node, ast.BinOp | ast.UnaryOp) and isinstance(node.op, _LOOSE[around])
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
    loose |= called in _CALLS_LOOSE or (around is ast.Pow and called in _CALLS_LOOSE_IN_POWERS)
    return _bracket(inner) if loose else inner


def _bracket(inner: str) -> str:
    return f"<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>"


def _number(value: object) -> str:
    digits, _, exponent = f"{value:.10g}".partition("e")
    if not exponent:
        return f"<mn>{digits}</mn>"
    power = f"<msup><mn>10</mn><mn>{str(int(exponent)).replace('-', '−')}</mn></msup>"
    return power if digits == "1" else f"<mn>{digits}</mn><mo>·</mo>{power}"


def _call(name: str, arguments: list[ast.expr], names: Mapping[str, str]) -> str:
    first = arguments[0]
    inside = first.func.id if isinstance(first, ast.Call) and isinstance(first.func, ast.Name) else ""
    if (name, inside) in _DENSITIES and isinstance(first, ast.Call):
        return f"{_DENSITIES[name, inside]}{_bracket(_row(first.args[0], names))}"
    rows = [_row(a, names) for a in arguments]
    if name == "select" and isinstance(first, ast.Constant):  # x > 0 rather than 0 < x
        return _cases(rows[2], f"{rows[1]}<mo>&gt;</mo>{rows[0]}", rows[3])
    if name in _FORMS:
        return _FORMS[name](*rows)
    rows = ["<mn>0</mn>", *rows] if name == "relu" else rows
    return f"<mi>{_WORDS.get(name) or escape(name)}</mi>{_bracket('<mo>,</mo>'.join(rows))}"


def _cases(then: str, condition: str, otherwise: str) -> str:
    lines = ((then, f"<mtext>if&#xa0;</mtext>{condition}"), (otherwise, "<mtext>otherwise</mtext>"))
    cell = '<mtd style="text-align: left">{}</mtd>'
    rows = "".join(f"<mtr>{cell.format(a)}{cell.format(b)}</mtr>" for a, b in lines)
    return f'<mo form="prefix" stretchy="true">{{</mo><mtable>{rows}</mtable>'


_DENSITIES = {
    ("hump", "sigmoid"): f"<mi>σ</mi>{_PRIME}",
    ("dome", "tanh"): "<msup><mi>sech</mi><mn>2</mn></msup>",
}
_CALLS_LOOSE = ("select",)
_CALLS_LOOSE_IN_POWERS = ("sqrt", "exp", "log", "softplus", "hump")
_FORMS: dict[str, Callable[..., str]] = {
    "sqrt": "<msqrt>{}</msqrt>".format,
    "exp": "<msup><mi>e</mi>{}</msup>".format,
    "log": lambda z: f"<mi>log</mi>{_bracket(z)}",
    "expm1": lambda z: _bracket(f"<msup><mi>e</mi>{z}</msup><mo>−</mo><mn>1</mn>"),
    "softplus": lambda z: f"<mi>log</mi>{_bracket(f'<mn>1</mn><mo>+</mo><msup><mi>e</mi>{z}</msup>')}",
    "positive": "{}".format,
    "hump": lambda s: f"{s}{_bracket(f'<mn>1</mn><mo>−</mo>{s}')}",
    "dome": lambda t: _bracket(f"<mn>1</mn><mo>−</mo><msup>{t}<mn>2</mn></msup>"),
    "above": "<mrow><mo>[</mo>{}<mo>&gt;</mo>{}<mo>]</mo></mrow>".format,
    "within": lambda z, low, high: f"<mrow><mo>[</mo>{low}<mo>≤</mo>{z}<mo>≤</mo>{high}<mo>]</mo></mrow>",
    "select": lambda a, b, p, q: _cases(p, f"{a}<mo>&lt;</mo>{b}", q),
}
