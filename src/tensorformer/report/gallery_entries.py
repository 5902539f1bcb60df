"""What the gallery says about each activation, from the catalogue alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.report import gallery_math as maths
from tensorformer.report.gallery_sliders import Slider, sliders
from tensorformer.report.quantities import MINUS

Fact = tuple[str, Markup | str]
Keys = Mapping[Scalar | Gate, str]
# Dear operations first.
_OPERATIONS = ("erfc", "tanh", "exp", "expm1", "log", "sqrt", "div", "select", "max", "min", "mul", "add")
LEVELS = (0.1, 0.3, 1, 3, 10, 30, 100)  # between the bands of every map
_REACHES = (6.0, 10.0, 20.0, 40.0, 60.0)


@dataclass(frozen=True)
class Entry:
    """One activation as the page shows it."""

    key: str  # of its place in the page
    name: str
    halves: tuple[Scalar, ...]  # f, or φ and ψ, at the sliders' first values
    formulas: list[Markup]
    facts: list[Fact]
    sliders: list[Slider]
    reach: tuple[float, ...]  # of x, or of g and u: how far from zero it is drawn at first
    words: str  # what the search looks into

    @property
    def at(self) -> Markup:
        """The sliders' first values, for which alone some facts hold."""
        pairs = [Markup("{} = {}").format(maths.letter(s.name), number(s.value)) for s in self.sliders]
        return Markup(", ").join(pairs)


def entries() -> tuple[list[Entry], list[Entry]]:
    """Return the scalars and the gates of the catalogue, in its order."""
    scalars, gates = list(SCALARS.values()), list(GATES.values())
    keys = _keys([*scalars, *gates])
    return [_scalar(s, gates, keys) for s in scalars], [_gate(g, keys) for g in gates]


def number(value: float) -> str:
    """Return a number to five digits, as a reader meets it."""
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    return f"{value + 0.0:.5g}".replace("-", MINUS)


def _scalar(scalar: Scalar, gates: list[Gate], keys: Keys) -> Entry:
    places = sliders(scalar)
    bound = scalar.bind(**{s.name: s.value for s in places})
    users = [g for g in gates if scalar.name in (g.gate.name, g.value.name)]
    facts: list[Fact] = [
        *_values("f", bound.image),
        ("Limits", _limits(scalar)),
        ("Smoothness", _smoothness(bound.smoothness)),
        ("Degree", _degree(scalar.degree)),
        ("Cost", _cost(scalar.cost)),
        ("Source", scalar.source),
        *_listed("Models", scalar.models),
        *_listed("In gates", [_link(g, keys) for g in users]),
        *_listed("Aliases", scalar.aliases),
    ]
    words = [scalar.name, *scalar.aliases, *scalar.models, scalar.source, *scalar.needs]
    formulas = [maths.scalar(scalar), maths.slope(scalar)]
    return Entry(keys[scalar], scalar.name, (bound,), formulas, facts, places, (_reach(bound),), _searched(words))


def _gate(gate: Gate, keys: Keys) -> Entry:
    places = sliders(gate)
    bound = gate.bind(**{s.name: s.value for s in places})
    halves = (bound.gate, bound.value)
    smooth = [s.smoothness for s in halves]
    finite = [k for k in smooth if k is not None]
    facts: list[Fact] = [
        ("φ, ψ", Markup(", ").join(_link(s, keys) for s in (gate.gate, gate.value))),
        *_values("h", _product(bound.gate.image, bound.value.image)),
        ("Smoothness", _smoothness(min(finite) if finite else None)),
        ("Degree", _degree(gate.degree)),
        ("Cost", _cost(gate.cost)),
        ("Source", gate.source),
        *_listed("Models", gate.models),
        *_listed("Aliases", gate.aliases),
    ]
    words = [gate.name, *gate.aliases, *gate.models, gate.source, gate.gate.name, gate.value.name, *gate.needs]
    reach = (_reach(bound.gate), _reach(bound.value))
    return Entry(keys[gate], gate.name, halves, [maths.gate(gate)], facts, places, reach, _searched(words))


def _keys(shown: list[Scalar | Gate]) -> dict[Scalar | Gate, str]:
    """Give each an HTML id; the name of another package's entry may be anything."""
    found: dict[Scalar | Gate, str] = {}
    for entry in shown:
        plain = key = f"{type(entry).__name__.lower()}-{re.sub('[^A-Za-z0-9_]+', '-', entry.name)}"
        copies = 1
        while key in found.values():
            copies += 1
            key = f"{plain}-{copies}"
        found[entry] = key
    return found


def _link(to: Scalar | Gate, keys: Keys) -> Markup:
    """Return the name, as a link where the page has a place for it."""
    key = next((k for entry, k in keys.items() if (type(entry), entry.name) == (type(to), to.name)), None)
    return Markup("{}").format(to.name) if key is None else Markup('<a href="#{}">{}</a>').format(key, to.name)


def _searched(words: Iterable[str]) -> str:
    return " ".join(words).lower()


def _listed(label: str, items: Iterable[str]) -> list[Fact]:
    joined = Markup(", ").join(items)
    return [(label, joined)] if joined else []


def _product(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    corners = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(corners), max(corners)


def _values(of: str, image: tuple[float, float]) -> list[Fact]:
    low, high = image
    sides = (math.isfinite(low), math.isfinite(high))
    bound = {
        (True, True): f"|{of}| ≤ {number(max(abs(low), abs(high)))}",
        (True, False): "below only",
        (False, True): "above only",
        (False, False): "none",
    }[sides]
    return [("Range", f"{number(low)} … {number(high)}"), ("Bound", bound)]


def _limits(scalar: Scalar) -> Markup:
    left, right = (maths.inline(end) for end in scalar.limits)
    return Markup("{} at −∞, {} at ∞").format(left, right)


def _smoothness(k: int | None) -> Markup | str:
    if k == -1:
        return "jumps"
    return Markup("<math><msup><mi>C</mi><mn>{}</mn></msup></math>").format("∞" if k is None else k)


def _degree(degree: int | None) -> str:
    return "not a polynomial" if degree is None else str(degree)


def _cost(cost: Mapping[str, int]) -> str:
    known = [n for n in _OPERATIONS if n in cost]
    names = known + [n for n in cost if n not in known]
    return ", ".join(n if cost[n] == 1 else f"{cost[n]} {n}" for n in names) or "nothing"


def _reach(scalar: Scalar) -> float:
    """Return how far to draw so that a bounded side comes near its bound."""
    import torch

    ends = [(side, float(scalar.oracle(side * math.inf))) for side in (-1, 1)]
    for reach in _REACHES:
        at = [(scalar(torch.tensor(0.8 * side * reach, dtype=torch.float64)).item(), end) for side, end in ends]
        if all(math.isinf(end) or abs(y - end) <= 0.1 * max(1.0, abs(end)) for y, end in at):
            return reach
    return _REACHES[0]
