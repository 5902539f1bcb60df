"""What a study of routing says in sentences, each made of its numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorformer.study.routing_result import SCALES, Head, Layer, Run

Value = float | None


class Spread(NamedTuple):
    """Quartiles over heads."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Group:
    """The layers of one run that have the same mixer: what is never averaged with others."""

    run: Run
    mixer: str
    layers: list[Layer]

    @property
    def label(self) -> str:
        """The run's name, with the mixer's where it has several."""
        several = len({layer.mixer for layer in self.run.layers}) > 1
        return f"{self.run.name} · {self.mixer}" if several else self.run.name

    @property
    def heads(self) -> list[Head]:
        """All heads of all its layers."""
        return [head for layer in self.layers for head in layer.heads]

    def spread(self, of: Callable[[Head], Value]) -> Spread | None:
        """Return the quartiles over heads of one number; None where no head has it."""
        return quartiles([of(head) for head in self.heads])


def groups(runs: Sequence[Run]) -> Iterator[Group]:
    """Yield each run's layers by mixer, in the order of the layers."""
    for run in runs:
        for mixer in dict.fromkeys(layer.mixer for layer in run.layers):
            yield Group(run, mixer, [layer for layer in run.layers if layer.mixer == mixer])


def quartiles(values: Sequence[Value]) -> Spread | None:
    """Return the quartiles of what is there, linear between neighbours; None where nothing is."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return Spread(known[0], known[0], known[0]) if known else None
    return Spread(*statistics.quantiles(known, n=4, method="inclusive"))


def at_keys(run: Run, keys: int) -> int:
    """Return the bin of rows that see so many keys."""
    return next(i for i, (_, last) in enumerate(run.keys) if keys <= last)


def span(first: int, last: int) -> str:
    """Return a bin in words."""
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def findings(runs: Sequence[Run]) -> list[str]:
    """Return what the runs say: on competition, on sharpening, and on growth with context."""
    said = []
    for group in groups(runs):
        said += [text for text in (_competition(group), _sharpening(group), _growth(group)) if text]
        lost = sum(layer.left_out for layer in group.layers)
        if lost:
            said.append(f"{group.label}: {lost:,} rows are left out, a weight of theirs is not finite.")
    return said


def _competition(group: Group) -> str:
    added = group.spread(lambda head: head.exchange["added"].rate)
    grown = group.spread(lambda head: head.exchange["grown"].rate)
    if added is None or grown is None:
        return ""
    return (
        f"{group.label}: the other keys lose {_plain(added.median)} for each unit of weight that an added key gains, "
        f"and {_plain(grown.median)} for each that a longer key gains."
    )


def _sharpening(group: Group) -> str:
    one, most = SCALES.index(1.0), len(SCALES) - 1
    odds = [group.spread(lambda head, i=i: head.log_odds[i]) for i in (one, most)]
    top = [group.spread(lambda head, i=i: head.top_share[i]) for i in (one, most)]
    told = [found.median for found in (*odds, *top) if found is not None]
    if len(told) < 4 or not told[0]:
        return ""
    return (
        f"{group.label}: with queries {SCALES[most]:g} times as long, the log-odds of the strongest key over the "
        f"second are {told[1] / told[0]:.2f} times as large, and its share of the mass goes from {told[2]:.1%} "
        f"to {told[3]:.1%}."
    )


def _growth(group: Group) -> str:
    run = group.run
    first, last = at_keys(run, run.context), len(run.keys) - 1
    if first == last:
        return ""
    parts = []
    for quantity, words in (("row_mass", "the mass of a row"), ("sum_rms", "the sum over values (rms)")):
        found = [group.spread(lambda head, i=i, q=quantity: head.curves[q][i]) for i in (first, last)]
        if found[0] and found[1]:
            parts.append(f"{words} goes from {found[0].median:.3g} to {found[1].median:.3g}")
    rows = f"from rows of {span(*run.keys[first])} keys to rows of {span(*run.keys[last])}"
    return f"{group.label}: {rows}, {', '.join(parts)}." if parts else ""


def _plain(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00")
