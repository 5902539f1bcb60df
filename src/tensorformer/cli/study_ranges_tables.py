"""A study of ranges as tables of at most a hundred columns."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tensorformer.study.ranges_result import Effect, Layer, Product, Ranges, Summary
from tensorformer.study.ranges_words import number

_NAMES = {"gate": "gate g", "phi": "φ(g)", "up": "up u", "psi": "ψ(u)", "product": "product h"}
_RANGES = ("min", "0.1 %", "median", "99.9 %", "max", "rms", "kurtosis", "outliers\n%", "zeros\n%", "negative\n%")
_SATURATED = ("φ low\n%", "φ high\n%", "ψ low\n%", "ψ high\n%", "dead", "faint", "of units", "NaN", "±inf")


def show(result: Ranges, console: Console) -> None:
    """Print everything: distributions, saturation, formats, other gates, findings, and what the words mean."""
    layers, labels = result.layers, _labels(result.layers)
    wide, formats = max(map(len, labels)), [e.label for e in layers[0].own.effects]

    def each(cells: Callable[[Layer], Iterable[str]]) -> list[list[str]]:
        return [[label, *cells(layer)] for label, layer in zip(labels, layers, strict=True)]

    console.width = max(console.width, 100)  # a narrow terminal wraps the lines; cut off, they would lose figures
    console.print(f"{result.source}: {result.tokens:,} tokens", soft_wrap=True)
    _distributions(result, console)
    _heading(console, "Saturated inputs, dead units, values that are not finite")
    console.print(_table(wide, _SATURATED, 6, each(_saturated)))
    for heading, cell in _FORMATS.items():
        _heading(console, heading)
        console.print(_table(wide, formats, 7, each(lambda layer, cell=cell: map(cell, layer.own.effects))))
    if any(layer.instead for layer in layers):
        _heading(console, "Other gates on the same inputs: signal-to-noise of a token in dB (medians over layers)")
        rows = list(_gates(result))
        console.print(_table(max(len(r[0]) for r in rows), ("bound", "max |h|", "kurtosis", *formats), 7, rows))
    _heading(console, "What caps buy")
    for finding in result.findings or ["no capped gate was measured beside one without caps"]:
        console.print(finding)
    _heading(console, "What the words mean")
    for term, meaning in result.legend.items():
        console.print(f"{term}: {meaning}")


def _distributions(result: Ranges, console: Console) -> None:
    _heading(console, "What goes through each gate")
    console.print(_table(10, _RANGES, 7, []))
    before = ""
    for layer in result.layers:
        console.print(f"{layer.name} {_short(layer.own.gate)}", soft_wrap=True)
        quantities = layer.inside | {"product": layer.own.product}
        seen = ("gate", "up") if layer.name == before else ()  # the inputs of gates that share them
        rows = [[_NAMES[key], *_distribution(quantities[key])] for key in _NAMES if key in quantities.keys() - seen]
        before = layer.name
        console.print(_table(10, _RANGES, 7, rows, header=False))


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _table(first: int, columns: Sequence[str], width: int, rows: Sequence[list[str]], header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold", show_header=header)
    table.add_column("", min_width=first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", min_width=max(width, *map(len, column.split("\n"))), no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _labels(layers: Sequence[Layer]) -> list[str]:
    """Return the layers' names, with the gate where several share a name."""
    names = [layer.name for layer in layers]
    shared = len(set(names)) < len(names)
    return [f"{layer.name} {_short(layer.own.gate)}" if shared else layer.name for layer in layers]


def _short(gate: str) -> str:
    """Return ``situ(4, 25)`` for ``situ(beta=4.0, linear_beta=25.0)``."""
    return re.sub(r"\w+=|\.0\b", "", gate)


def _distribution(s: Summary) -> list[str]:
    p = s.percentiles
    values = (s.min, p.get("0.1"), p.get("50"), p.get("99.9"), s.max, s.rms, s.kurtosis)
    return [*map(_number, values), *map(_percent, (s.outliers, s.zeros, s.negative))]


def _saturated(layer: Layer) -> list[str]:
    found = layer.own.saturation
    sides = [found[key].share if key in found else None for key in ("phi low", "phi high", "psi low", "psi high")]
    everything = [*layer.inside.values(), layer.own.product]
    counts = (layer.dead.zero, layer.dead.faint, layer.dead.units)
    broken = (sum(s.nan for s in everything), sum(s.inf for s in everything))
    return [*map(_percent, sides), *(f"{n:,}" for n in (*counts, *broken))]


def _gates(result: Ranges) -> Iterable[list[str]]:
    together: dict[str, list[Product]] = {}
    for _, products in result.sites():
        for product in products:
            together.setdefault(product.gate, []).append(product)
    for gate, found in together.items():
        largest = max(p.product.amax for p in found)
        snrs = [_median(e.token_snr_db for e in column) for column in zip(*(p.effects for p in found), strict=True)]
        kurtosis = _median(p.product.kurtosis for p in found)
        decibels = ["–" if snr is None else f"{snr:.1f}" for snr in snrs]
        yield [_short(gate), _number(found[0].bound), _number(largest), _number(kurtosis), *decibels]


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _snr(decibels: float | None, error: float | None) -> str:
    if decibels is None:
        return "exact" if error == 0 else "–"
    return f"{decibels:.1f}"


def _worst(effect: Effect) -> str:
    if effect.worst_token is None:
        return "–" if not effect.tokens else "broken"
    return number(100 * effect.worst_token)


# Heading -> what stands in a format's column.
_FORMATS: dict[str, Callable[[Effect], str]] = {
    "Output of the down projection from a quantised product: signal-to-noise of all tokens together in dB": lambda e: (
        _snr(e.snr_db, e.error)
    ),
    "The same of a token, the mean in dB": lambda e: _snr(e.token_snr_db, e.error),
    "The same: error of the worst token in %": _worst,
}


def _percent(share: float | None) -> str:
    if not share:
        return "–" if share is None else "0"
    return "<0.01" if share < 1e-4 else f"{100 * share:.2f}" if share < 0.1 else f"{100 * share:.1f}"


def _number(x: float | None) -> str:
    return "–" if x is None else number(x)
