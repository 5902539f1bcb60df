"""The MathML says what the formula says: read back as Python, it has the catalogue's values."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.report import gallery_math as maths
from tensorformer.report.gallery_sliders import sliders

POINTS = (-7.25, -3.5, -1.27846, -0.4, 0.3, 1.1, 2.7, 6.5, 11.25)
SIGNS = {"−": "-", "·": "*", "\u2062": "*", "≤": "<=", "=": "==", "′": "_prime"}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "σ": lambda z: 1 / (1 + math.exp(-z)),
    "σ_prime": lambda z: math.exp(-z) / (1 + math.exp(-z)) ** 2,
    "Φ": lambda z: 0.5 * math.erfc(-z / math.sqrt(2)),
    "φ": lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi),
    "sech2": lambda z: 1 / math.cosh(z) ** 2,
    "clip": lambda z, low, high: min(max(z, low), high),
    "tanh": math.tanh,
    "log": math.log,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "max": max,
    "min": min,
}


def read(node: ET.Element) -> str:
    """Return a piece of MathML as Python, as a person reads it: a bracket beside a function holds its argument."""
    parts = list(node)
    match node.tag:
        case "mn" | "mo":
            return SIGNS.get(node.text or "", node.text or "").replace("−", "-")
        case "mi":
            return {"π": "pi"}.get(node.text or "", node.text or "")
        case "mtext":
            return ""
        case "mfrac":
            return f"(({read(parts[0])})/({read(parts[1])}))"
        case "msqrt":
            return f"sqrt({''.join(map(read, parts))})"
        case "msub":
            return f"{read(parts[0])}_{read(parts[1])}"
        case "msup":
            base, power = map(read, parts)
            return {"e": f"exp({power})", "sech": "sech2"}.get(base, f"{base}**({power})")
        case "mtable":
            (p, condition), (q, _) = [[read(cell) for cell in row] for row in parts]
            return f"(({p}) if {condition} else ({q}))"
    text = "".join(map(read, parts))
    # [a > b] is 1 or 0; a brace opens cases, which bring their own brackets.
    return (
        f"(1.0*({text[1:-1]}))"
        if text.startswith("[") and node.tag == "mrow" and len(parts) > 3
        else text.replace("{", "")
    )


def told(markup: str) -> str:
    """Return the right-hand side of a displayed formula as Python."""
    root = ET.fromstring(markup)
    return read(root).split("==", 1)[1]


def valued(formula: str, x: dict[str, float], parameters: dict[str, float]) -> float:
    """Return the value of a formula that ``told`` has returned."""
    given = {read(ET.fromstring(maths.symbol(n))): v for n, v in parameters.items()}
    return float(eval(formula, {"__builtins__": {}, "pi": math.pi}, FUNCTIONS | x | given))


def numbers(of: Scalar | Gate) -> dict[str, float]:
    """Return the gallery's first values of the parameters."""
    return {s.name: s.value for s in sliders(of)}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalars_formula_and_slope_say_what_they_are(name: str) -> None:
    given = numbers(SCALARS[name])
    bound = SCALARS[name].bind(**given)
    for markup, function in ((maths.scalar(bound), bound), (maths.slope(bound), bound.derivative)):
        formula = told(markup)
        for x in POINTS:
            exact = function(torch.tensor(x, dtype=torch.float64)).item()
            # A derivative's numbers are shown to seven digits.
            assert valued(formula, {"x": x}, given) == pytest.approx(exact, rel=2e-5, abs=1e-9), formula


@pytest.mark.parametrize("name", GATES)
def test_a_gates_formula_says_what_it_is(name: str) -> None:
    given = numbers(GATES[name])
    gate = GATES[name].bind(**given)
    formula = told(maths.gate(gate))
    for g, u in zip(POINTS, reversed(POINTS), strict=True):
        exact = gate(*(torch.tensor(v, dtype=torch.float64) for v in (g, u))).item()
        assert valued(formula, {"g": g, "u": u}, given) == pytest.approx(exact, rel=1e-8), formula


@pytest.mark.parametrize(
    "formula", ["(x + 1)*x", "x - (1 - x)", "-(x + 2)", "(2*x)**2", "x/(x + 3)/2", "2*(-x)", "(x**2)**3"]
)
def test_brackets_are_where_they_are_needed(formula: str) -> None:
    written = read(ET.fromstring(f"<math>{maths.written(formula)}</math>"))
    for x in (1.5, -0.75):
        assert valued(written, {"x": x}, {}) == pytest.approx(eval(formula, {"x": x})), written


def test_a_bracket_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "_bracket", lambda inner: f"<mrow>{inner}</mrow>")
    written = read(ET.fromstring(f"<math>{maths.written('(x + 1)*x')}</math>"))
    assert valued(written, {"x": 1.5}, {}) != pytest.approx(3.75)


def test_parameters_are_written_as_in_their_papers() -> None:
    assert maths.symbol("linear_beta") == "<mi>λ</mi>"
    assert maths.symbol("limit") == "<mi>L</mi>"
    assert maths.symbol("alpha_p") == "<msub><mi>α</mi><mi>p</mi></msub>"


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no MathML form of 'x % 2'"):
        maths.written("x % 2")
