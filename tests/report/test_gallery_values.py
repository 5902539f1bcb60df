"""The functions in the page are the catalogue's: the same values to twelve digits, out to the tails, ±∞ and NaN."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

from tensorformer.errors import GateError
from tensorformer.gates import GATES, SCALARS, Scalar
from tensorformer.gates import expr as ex
from tensorformer.gates.js_source import JS_HELPERS, js_function
from tensorformer.report import gallery
from tests.report.report_browser import NEEDS_BROWSER

EDGES = (0.0, 1e-300, 1e-8, 1e-3, 1.27846, 2.27, 2.7, 5.0, 8.0, 20.0, 26.0, 37.0, 100.0, 700.0, 1e4, 1e10, math.inf)
POINTS = [*(s * x for x in EDGES for s in (1, -1)), math.nan, *torch.linspace(-12.3, 12.7, 101).tolist()]
RELATIVE = 1e-12
# Besides, of the value and of the slope: nothing that is not subnormal, and what is left of terms of size 1 that
# cancel, as in 1 − tanh².
ABSOLUTE = (1e-307, 1e-15)


@pytest.fixture(scope="module")
def page() -> str:
    return gallery.page()


def halves(entry: dict[str, Any]) -> list[Scalar]:
    """Return the scalars of an entry of the page, bound as its sliders stand at first."""
    if entry["kind"] == "scalar":
        return [SCALARS[entry["name"]].bind(**entry["values"])]
    gate = GATES[entry["name"]].bind(**entry["values"])
    return [gate.gate, gate.value]


def wrong_values(browser: Browser, page: str) -> list[str]:
    """Return what the page's own functions compute otherwise than the catalogue, one text a function."""
    data = json.loads(re.search(r'id="entries">(.*?)</script>', page, re.S)[1])  # pyright: ignore[reportOptionalSubscript]
    script = page[page.rindex("<script>") :]
    functions = script[script.index("const $FLOOR") : script.index("\n];\n") + 4]
    calls = [
        {"f": half["f"], "given": [entry["values"][n] for n in half["parameters"]]}
        for entry in data["entries"]
        for half in entry["halves"]
    ]
    ask = "calls.map((c) => FUNCTIONS[c.f].map((f) => points.map((x) => f(x, ...c.given))))"
    tab = browser.new_page()
    answers = iter(tab.evaluate(f"([calls, points]) => {{ {functions} return {ask}; }}", [calls, POINTS]))
    tab.close()
    found = []
    x = torch.tensor(POINTS, dtype=torch.float64)
    for entry in data["entries"]:
        for scalar in halves(entry):
            for order, (got, ours) in enumerate(zip(next(answers), (scalar(x), scalar.derivative(x)), strict=True)):
                for at, a, b in zip(POINTS, got, ours.tolist(), strict=True):
                    if order and at != at:  # the slope of a NaN is a convention: 0 or 1 at a torch kink, here NaN
                        continue
                    if not (a == b or (a != a and b != b) or abs(a - b) <= RELATIVE * abs(b) + ABSOLUTE[order]):
                        found.append(f"{scalar!r}, order {order}, at {at}: {a}, not {b}")
                        break
    return found


@pytest.mark.real
@NEEDS_BROWSER
def test_the_pages_functions_are_the_catalogues(browser: Browser, page: str) -> None:
    assert wrong_values(browser, page) == []


@pytest.mark.real
@NEEDS_BROWSER
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const $Phi = (z) => 0.5 *", "const $Phi = (z) => 0.505 *"),
        ("const $hump = (s) => s *", "const $hump = (s) => 1.01 * s *"),
        ("(0.044715*", "(0.0451*"),
        ("1.1283791670955126", "1.1283791671"),
        ("for (let n = 80;", "for (let n = 8;"),
    ],
    ids=["one percent", "a derivative", "a constant", "the series", "the fraction"],
)
def test_a_wrong_function_is_caught(browser: Browser, page: str, old: str, new: str) -> None:
    assert old in page
    assert wrong_values(browser, page.replace(old, new, 1))


@pytest.mark.real
@NEEDS_BROWSER
def test_erfc_keeps_its_tail_to_the_last_digits(browser: Browser) -> None:
    import mpmath

    points = [k / 16 for k in range(-96, 425)]
    tab = browser.new_page()
    values = tab.evaluate(f"(points) => {{ {JS_HELPERS} return points.map($erfc); }}", points)
    tab.close()
    for z, value in zip(points, values, strict=True):
        exact = mpmath.erfc(z)
        assert abs(value - exact) <= 2e-14 * exact, f"erfc({z}) = {value}, {float(abs(value / exact - 1))} off"


def test_a_function_without_a_form_is_refused() -> None:
    with pytest.raises(GateError, match=r"no JavaScript form of 'erfc'.*js_source"):
        js_function(ex.erfc(ex.x), ["x"])


def test_no_parameters_name_can_matter() -> None:
    scalar = Scalar("ours", "new*x + delete", ("-oo", "oo"), "here", {"new": "> 0", "delete": "> 0"})
    assert js_function(scalar.expr, ["x", "new", "delete"]) == "(a0, a1, a2) => { return (a2 + (a0*a1)); }"
