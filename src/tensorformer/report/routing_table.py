"""The table of a study of routing: a line each layer, with the spread over its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorformer.report import quantities as q
from tensorformer.report.routing_series import layer_spread, measured_at
from tensorformer.report.table import Cell
from tensorformer.study.routing_result import SCALES, Head, Layer, Routing, Run

DIGITS = 3
FAR = (("Mass", "row_mass"), ("Effective keys", "effective_keys"), ("rms\u00a0of Σ\u00a0A\u00a0v", "sum_rms"))
NEAR = (*FAR, ("Negative", "negative_share"), ("Top share", "top_share"))  # shown within the training context only
SHARES = ("Negative", "Top share")


@dataclass(frozen=True)
class Table:
    """The layers of one run."""

    run: Run
    heads: list[tuple[str, list[str]]]  # words over several columns, and the columns' titles
    lines: list[tuple[str, list[Cell]]]


def tables(result: Routing) -> list[Table]:
    """Return a table for each run: median over the heads of a layer, under it the lowest and the highest head."""
    return [_table(run) for run in result.runs]


def _table(run: Run) -> Table:
    heads: list[tuple[str, list[str]]] = []
    measures: list[tuple[str, Callable[[Head], float | None]]] = []
    for shown, (words, i) in zip((NEAR, FAR), measured_at(run), strict=False):
        heads.append((f"At {words} keys", [title for title, _ in shown]))
        measures += [(title, lambda head, i=i, q=quantity: head.curves[q][i]) for title, quantity in shown]
    changes: list[tuple[str, Callable[[Head], float | None]]] = [
        ("Lost to an added key", lambda head: head.exchange["added"].rate),
        (f"Log-odds at {SCALES[-1]:g}×", _sharpened),
    ]
    heads.append(("When changed", [title for title, _ in changes]))
    lines = [
        (f"{layer.index} {layer.mixer}", [_cell(layer, title, of) for title, of in (*measures, *changes)])
        for layer in run.layers
    ]
    return Table(run, heads, lines)


def _sharpened(head: Head) -> float | None:
    once, most = head.log_odds[SCALES.index(1.0)], head.log_odds[-1]
    return most / once if once and most is not None else None


def _cell(layer: Layer, title: str, of: Callable[[Head], float | None]) -> Cell:
    found = layer_spread(layer, of)
    if found is None:
        return Cell(q.ABSENT)
    spread, least, most = found
    shown = _percent if title in SHARES else _number
    ends = "" if len(layer.heads) == 1 else f"{shown(least)} … {shown(most)}"
    return Cell(shown(spread.median), ends)


def _percent(value: float) -> str:
    return f"{q.number(100 * value, 1)}{q.THIN}%"


def _number(value: float) -> str:
    return q.number(value, 2) if abs(value) < 10 else q.significant(value, DIGITS)
