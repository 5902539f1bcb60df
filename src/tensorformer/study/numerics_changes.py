"""A formula with one thing changed: the mistakes people make, as formulas of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.gates import Gate, Scalar, expr
from tensorformer.gates.examples import EXAMPLES
from tensorformer.gates.parameters import Rule

Values = dict[str, float]


@dataclass(frozen=True)
class Free:
    """A formula with numbers left to find: ``make`` it from them; begin at ``start``; ``say`` what was found."""

    start: Values
    make: Callable[[Values], Any]
    say: Callable[[Values], str]
    signed: frozenset[str] = frozenset()  # those that may be negative


def numbers(form: Gate | Scalar) -> Values:
    """Return the values of its parameters that are there, as numbers."""
    for name, value in form.parameters.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise GateError(f"{form.name}: {name} has shape {tuple(value.shape)}; bind a plain number to study it")
    return {n: float(v) for n, v in form.parameters.items() if v is not None}


def changed(scalar: Scalar, formula: Any, **more: float) -> Scalar:
    """Return the scalar of another formula in the same parameters, and in ``more``."""
    have = numbers(scalar) | more
    names = sorted(str(s) for s in formula.free_symbols - {expr.x})
    needs: dict[str, Rule] = {n: scalar.needs.get(n, "any number") for n in names}
    return Scalar(scalar.name, str(formula), scalar.limits, "", needs).bind(**{n: have[n] for n in names})


def structural(scalar: Scalar) -> Iterator[tuple[str, Scalar]]:
    """Yield what is left out, or put elsewhere: in words, and the formula that makes."""
    formula = scalar.expr
    for what, other in _structural(formula):
        if other != formula:
            try:
                yield what, changed(scalar, other)
            except GateError:
                continue  # a form that can't be written down is no one's mistake


def _structural(formula: Any) -> Iterator[tuple[str, Any]]:
    kinds = {
        k: sorted((n for n in formula.atoms(expr.Primitive) if type(n).__name__ == k), key=str)
        for k in ("cap", "clip", "tanh")
    }
    yield "its sign is turned", -formula
    for node in (*kinds["cap"], *kinds["clip"]):
        yield f"the clamp {node} is missing", formula.subs(node, node.args[0])
    for node in kinds["clip"]:
        z, low, high = node.args
        yield f"of the clamp {node} only the upper side is there", formula.subs(node, expr.cap(z, high))
        yield f"of the clamp {node} only the lower side is there", formula.subs(node, -expr.cap(-z, -low))
    for node in kinds["cap"]:
        z, top = node.args
        yield f"{node} clamps below as well", formula.subs(node, expr.clip(z, -top, top))
        if formula == node:
            yield f"it clamps before and not after: {node}", z.subs(expr.x, expr.cap(expr.x, top))
        else:
            yield f"it clamps after and not before: {node}", expr.cap(formula.subs(node, z), top)
    for node in kinds["tanh"]:
        yield f"{node} is missing, only its argument is there", formula.subs(node, node.args[0])
    for node in sorted((n for n in formula.atoms(sympy.Add) if n.args[0].is_Number), key=str):
        yield f"the {_signed(node.args[0])} is missing", formula.subs(node, node - node.args[0])


def parameters(form: Gate | Scalar) -> Iterator[Free]:
    """Yield each parameter of a scalar or a gate left to find, and then all of them at once."""
    have = numbers(form)
    for name in have:
        yield several(form, [name])
    if len(have) > 1:
        yield several(form, list(have))


def several(form: Gate | Scalar, names: list[str]) -> Free:
    """Return ``form`` with these parameters left to find."""
    have = {n: v for n, v in numbers(form).items() if n in names}

    def say(found: Values) -> str:
        return " and ".join(
            f"{n} is {v:.6g}, not {have[n]:g}" for n, v in found.items() if f"{v:.6g}" != f"{have[n]:.6g}"
        )

    signed = frozenset(n for n in have if form.needs[n] == "any number" or have[n] == 0)
    return Free(have, lambda v: form.bind(**{**form.parameters, **v}), say, signed)


def constants(scalar: Scalar) -> Iterator[Free]:
    """Yield each number written in the formula, the argument of each function, and the result, left to find."""
    formula, k = scalar.expr, expr.symbol("factor")

    def free(other: Any, say: Callable[[float], str]) -> Free:
        return Free({"factor": 1.0}, lambda v: changed(scalar, other, **v), lambda v: say(v["factor"]))

    yield free(k * formula, lambda v: f"the result is {v:.8g} times what it should be")
    for node in sorted((n for n in formula.atoms(sympy.Function) if _curves(n)), key=str):
        name, argument = type(node).__name__, node.args[0]
        yield free(
            formula.subs(node, node.func(k * argument, *node.args[1:])),
            lambda v, name=name, argument=argument: (
                f"the argument of {name} is {v:.8g} times {_written(argument)}{_erf(name)}"
            ),
        )
    for number in sorted((n for n in formula.atoms(sympy.Rational) if n.q > 2 or n.p > 2), key=str):
        yield free(
            formula.xreplace({number: k * number}),
            lambda v, number=number: f"{float(number):g} is {v * float(number):.6g} there",
        )
    bound = expr.symbol("bound")
    for what, other in (
        ("result", expr.clip(formula, -bound, bound)),
        ("input", formula.subs(expr.x, expr.clip(expr.x, -bound, bound))),
    ):
        yield Free(
            {"bound": 8.0},
            lambda v, other=other: changed(scalar, other, **v),
            lambda v, what=what: f"the {what} is clamped to ±{v['bound']:.6g}",
        )


def begin(entry: Gate | Scalar, known: Values) -> Values:
    """Return numbers to begin with for an entry of the catalogue: those of the declared one where it has them."""
    return {n: known.get(n) or EXAMPLES.get(n, 1.0) for n in entry.needs}


def _curves(node: Any) -> bool:
    return type(node).__name__ in {"sigmoid", "tanh", "Phi", "exp", "expm1", "softplus"} and node.has(expr.x)


def _erf(name: str) -> str:
    return " (Φ(z) = ½ + ½ erf(z/√2): a wrong factor in erf)" if name == "Phi" else ""


def _written(argument: Any) -> str:
    return str(argument) if len(str(argument)) < 30 else "what it should be"


def _signed(number: Any) -> str:
    return f"{'+' if number > 0 else '−'} {abs(float(number)):g}"
