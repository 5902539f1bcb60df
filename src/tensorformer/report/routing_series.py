"""A study of routing as the rows that charts and tables are drawn from: quartiles over the heads of a series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tensorformer.report.series import Row, short
from tensorformer.study.routing_result import GAINS, SCALES, Head, Layer, Routing, Run, Values
from tensorformer.study.routing_words import Group, Spread, at_keys, groups, quartiles, span

OfHead = Callable[[Head], Values]


@dataclass(frozen=True)
class Series:
    """One line of every figure: the layers of a run that have the same mixer."""

    id: str  # safe in an expression
    label: str
    group: Group

    @property
    def mark(self) -> Row:
        """What every row of it carries."""
        return {"variant": self.group.label, "label": self.label, "id": self.id}


def all_series(result: Routing) -> list[Series]:
    """Return the lines, in the order of the runs."""
    found = list(groups(result.runs))
    cut = [short(group.label) for group in found]
    labels = cut if len(set(cut)) == len(cut) else [group.label for group in found]
    return [Series(f"v{i}", label, group) for i, (label, group) in enumerate(zip(labels, found, strict=True))]


def curves(result: Routing, quantity: str) -> list[Row]:
    """Return one quantity of the rows against the keys they see."""
    rows: list[Row] = []
    for series in all_series(result):
        run = series.group.run
        at: list[Row] = [{"keys": (a + b) / 2, "seen": span(a, b)} for a, b in run.keys]
        rows += _rows(series, at, lambda head: head.curves[quantity])
    return rows


def outputs(result: Routing) -> list[Row]:
    """Return what layers add to the residual stream against the keys their rows see, the spread over layers."""
    rows: list[Row] = []
    for series in all_series(result):
        for i, (a, b) in enumerate(series.group.run.keys):
            at: Row = {"keys": (a + b) / 2, "seen": span(a, b)}
            rows += _row(series, at, quartiles([layer.output[i] for layer in series.group.layers]))
    return rows


def distances(result: Routing) -> list[Row]:
    """Return the share of one key against its distance; the field is the distance and 1."""
    rows: list[Row] = []
    for series in all_series(result):
        run = series.group.run
        at: list[Row] = [{"away": math.sqrt((a + 1) * (b + 1)), "seen": span(a, b)} for a, b in run.distances]
        rows += _rows(series, at, lambda head: head.distance)
    return rows


def scales(result: Routing, of: OfHead) -> list[Row]:
    """Return a measure of sharpness against the scale of the queries."""
    return [row for series in all_series(result) for row in _rows(series, [{"scale": scale} for scale in SCALES], of)]


def exchanges(result: Routing, kind: str) -> list[Row]:
    """Return what the other keys lost for each unit that a key gained, against what it gained."""
    at: list[Row] = [{"gain": (low + high) / 2, "seen": f"{low:.0%} to {high:.0%}"} for low, high in GAINS]
    return [row for series in all_series(result) for row in _rows(series, at, lambda head: head.exchange[kind].rates)]


def contexts(result: Routing) -> set[int]:
    """Return the training contexts of the runs."""
    return {run.context for run in result.runs}


def even_shares(result: Routing) -> list[Row]:
    """Return the shares of a row whose keys are all alike, against the distance and 1."""
    run = max(result.runs, key=lambda run: run.context)
    mean_keys = (run.context // 2 + run.context) / 2
    return [{"away": away, "share": 1 / mean_keys} for away in (1.0, float(run.context))]


def layer_spread(layer: Layer, of: Callable[[Head], float | None]) -> tuple[Spread, float, float] | None:
    """Return the quartiles and the ends over a layer's heads; None where no head has the number."""
    known = [value for head in layer.heads if (value := of(head)) is not None]
    middle = quartiles(known)
    return None if middle is None else (middle, min(known), max(known))


def measured_at(run: Run) -> list[tuple[str, int]]:
    """Return the bins that a table shows: those of the training context, and of the longest window."""
    bins = dict.fromkeys((at_keys(run, run.context), len(run.keys) - 1))
    return [(span(*run.keys[i]), i) for i in bins]


def _rows(series: Series, at: Sequence[Row], of: OfHead) -> Iterator[Row]:
    for i, place in enumerate(at):
        yield from _row(series, place, series.group.spread(lambda head, i=i: of(head)[i]))


def _row(series: Series, at: Row, found: Spread | None) -> list[Row]:
    if found is None:
        return []
    return [series.mark | at | {"value": found.median, "low": found.low, "high": found.high}]
