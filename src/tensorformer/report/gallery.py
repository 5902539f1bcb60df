"""The gallery: one page that shows every activation of the catalogue, drawn from its own formula."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import tensorformer
from tensorformer.files import write_text
from tensorformer.gates import Scalar
from tensorformer.gates.js_source import JS_HELPERS, js_function
from tensorformer.report import escape, theme
from tensorformer.report import gallery_math as maths
from tensorformer.report.gallery_entries import LEVELS, Entry, entries, number
from tensorformer.report.html import environment, policy

SCRIPTS = ("gallery.draw.js", "gallery.compare.js", "gallery.js")
# Comparisons on offer: taken for each other, or one made to stand in for the other.
PAIRS = (
    ("scalar", "gelu", "gelu_tanh"),
    ("scalar", "gelu", "gelu_quick"),
    ("scalar", "silu", "gelu"),
    ("scalar", "silu", "hard_swish"),
    ("gate", "swiglu", "situ"),
    ("gate", "swiglu_clamped", "swiglu_clamp_after"),
    ("gate", "swiglu", "bilinear"),
)


def write_gallery(path: Path) -> Path:
    """Write the page.

    Args:
        path: The file; its folder is made if it is not there.

    Returns:
        ``path``.
    """
    write_text(path, page())
    return path


def page() -> str:
    """Return the page: one HTML text that asks for nothing, the same whenever the catalogue is."""
    scalars, gates = entries()
    functions = _Functions()
    data = [_data("scalar", e, functions) for e in scalars] + [_data("gate", e, functions) for e in gates]
    script = _script(functions.source())
    templates = environment(True)
    return templates.get_template("gallery.html.jinja").render(
        scalars=scalars,
        gates=gates,
        pairs=_pairs(scalars, gates),
        letter=maths.letter,
        number=number,
        css=theme.css() + _text("page.css") + _text("gallery.css"),
        data=escape.script_json({"levels": LEVELS, "entries": data}),
        script=script,
        policy=policy([script]),
        version=tensorformer.__version__,
    )


class _Functions:
    """The distinct functions of the page, each once: those of most gates are scalars of the catalogue."""

    def __init__(self) -> None:
        self.printed: dict[str, int] = {}

    def place(self, scalar: Scalar) -> int:
        """Return where the function and its derivative are in FUNCTIONS."""
        names = ["x", *scalar.needs]
        plain = Scalar(scalar.name, scalar.formula, scalar.limits, scalar.source, scalar.needs)
        pair = f"[{js_function(plain.expr, names)}, {js_function(plain.derivative_expr, names)}]"
        return self.printed.setdefault(pair, len(self.printed))

    def source(self) -> str:
        """Return the script that defines them."""
        return f"{JS_HELPERS}const FUNCTIONS = [\n" + ",\n".join(self.printed) + "\n];\n"


def _data(kind: str, entry: Entry, functions: _Functions) -> dict[str, Any]:
    return {
        "key": entry.key,
        "kind": kind,
        "name": entry.name,
        "halves": [{"f": functions.place(s), "parameters": list(s.needs)} for s in entry.halves],
        "values": {s.name: s.value for s in entry.sliders},
        "reach": entry.reach,
    }


def _pairs(scalars: list[Entry], gates: list[Entry]) -> list[tuple[str, str, str]]:
    keys = {("scalar", e.name): e.key for e in scalars} | {("gate", e.name): e.key for e in gates}
    return [(f"{a} · {b}", keys[kind, a], keys[kind, b]) for kind, a, b in PAIRS]


def _script(functions: str) -> str:
    text = '"use strict";\n(() => {\n' + functions + "".join(map(_text, SCRIPTS)) + "})();\n"
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("the gallery's script would end its own element")
    return text


def _text(name: str) -> str:
    return (importlib.resources.files("tensorformer.report") / "templates" / name).read_text(encoding="utf-8")
