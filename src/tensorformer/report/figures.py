"""Which figures a report has, in order, each with the words that say how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorformer.lab.results import Comparison
from tensorformer.report import accuracy, charts, series
from tensorformer.report import quantities as q
from tensorformer.report.theme import Theme

ORDER = (
    "difference",
    "accuracy",
    "accuracy_context",
    "curves",
    "gap",
    "context",
    "wall_clock",
    "data_to_match",
)
Draw = Callable[[Comparison, Theme], Any]


@dataclass(frozen=True)
class Figure:
    """One chart with its title, caption and the description a screen reader gets."""

    key: str
    title: str
    caption: str
    label: str
    draw: Draw

    @property
    def png(self) -> str:
        """The picture's file name."""
        return f"{self.key}.png"


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures that this comparison has data for.

    Args:
        comparison: The finished comparison.

    Returns:
        In the order of the page.
    """
    name = series.labels(comparison).get(comparison.baseline, comparison.baseline)
    cut = series.first_drawn(comparison)
    many, others = len(comparison.seeds) > 1, len(comparison.variants) > 1
    band = "The band runs from the lowest to the highest seed." if many else "One seed, so no band."
    mean = ", mean over seeds" if many else ""
    bars = "Bars are 95\u202f% intervals over seeds." if many else "One seed, so no intervals."
    dots = " Bar: 95\u202f% interval; open circles: the seeds." if many else ""
    apart = " Points are moved sideways a little so that they do not cover one another." if others else ""
    start = f" The first {cut:,} tokens are not drawn." if cut else ""
    text = comparison.probe is None
    levels = "Dashed: a perfect learner, and a guess among all possible answers."
    others_than = "other windows than" if text else "fewer examples than"
    cut_to = "when the same text is cut into windows" if text else "on examples"
    found = []

    def add(key: str, title: str, draw: Draw, label: str, *caption: str) -> None:
        found.append(Figure(key, title, " ".join(caption), label, draw))

    if series.differences(comparison):
        add(
            "difference",
            "Difference to the baseline",
            charts.differences,
            _spoken_differences(comparison),
            f"Final loss less that of {name}; left of the line is better.{dots}",
            f"Shaded: ±δ = {comparison.delta:g}, too small to matter.",
        )
    if series.accuracies(comparison):
        add(
            "accuracy",
            "Accuracy along training",
            accuracy.along_training,
            _spoken_accuracies(comparison),
            f"Share of right answers on the validation part during training{mean}. {band} {levels}",
        )
    if series.context_accuracies(comparison):
        add(
            "accuracy_context",
            "Accuracy against context length",
            accuracy.by_context,
            _spoken_context_accuracies(comparison),
            f"Share of right answers at the end, on examples made for this length. {bars}{apart} {levels}",
        )
    if series.curves(comparison):
        add(
            "curves",
            "Loss along training",
            charts.curves,
            _spoken_curves(comparison),
            f"Loss on the validation part during training{mean}. {band} It is taken on {others_than} the final loss, "
            f"and need not end there.{start}",
        )
    if series.gaps(comparison):
        add(
            "gap",
            "Difference along training",
            charts.gaps,
            f"Line chart of each variant’s validation loss less that of {name}, along training.",
            f"The same curves, less {name}’s of the same seed: what differs shows here,",
            f"the seeds’ common noise does not. {band} Shaded: ±δ.",
        )
    if series.contexts(comparison):
        add(
            "context",
            "Loss against context length",
            charts.contexts,
            _spoken_contexts(comparison),
            f"Final loss {cut_to} of this length. {bars}{apart}",
        )
    if series.curves(comparison):
        add(
            "wall_clock",
            "Loss against wall clock",
            charts.wall_clock,
            _spoken_clock(comparison),
            "The loss curves against time: steps × the median step of a timing pass in which the variants took turns,",
            f"so that other work on the machine weighs on all alike. {band}",
        )
    if series.baseline_lengths(comparison):
        add(
            "data_to_match",
            "Data to match",
            charts.data_to_match,
            f"Line chart of {name}’s final loss by training tokens, with every variant’s final loss beside it.",
            f"Line: {name} trained on less and on more. A dashed line leads from a variant to the training length at",
            f"which {name} has the same loss; where there is none, that length is outside the measured ones.",
        )
    return found


def _spoken_differences(comparison: Comparison) -> str:
    parts = [
        f"{r['variant']} {r['text']}, 95 % interval {r['interval']}, {r['verdict']}"
        for r in series.differences(comparison)
    ]
    what = f"the final loss less that of {comparison.baseline}, {series.unit(comparison)}"
    return f"Interval plot of {what}. {'; '.join(parts)}."


def _spoken_curves(comparison: Comparison) -> str:
    parts = [f"{v.name} ends at {q.level(v.loss)}" for v in series.ordered(comparison)]
    return f"Line chart of validation loss against training tokens. {'; '.join(parts)} {series.unit(comparison)}."


def _spoken_accuracies(comparison: Comparison) -> str:
    last = {row["variant"]: float(row["accuracy"]) for row in series.accuracies(comparison)}
    parts = [f"{name} ends at {q.share(found)}" for name, found in last.items()]
    return f"Line chart of the share of right answers against training tokens. {'; '.join(parts)}."


def _spoken_context_accuracies(comparison: Comparison) -> str:
    parts = [f"{r['variant']} at {r['context']} tokens {r['text']}" for r in series.context_accuracies(comparison)]
    return f"Chart of the share of right answers against context length. {'; '.join(parts)}."


def _spoken_contexts(comparison: Comparison) -> str:
    parts = [f"{r['variant']} at {r['context']} tokens {r['text']}" for r in series.contexts(comparison)]
    return f"Chart of final loss against context length. {'; '.join(parts)}."


def _spoken_clock(comparison: Comparison) -> str:
    parts = [f"{v.name} {q.scaled(v.tokens_per_second, ' tokens/s')}" for v in series.ordered(comparison)]
    return f"Line chart of validation loss against training time. {'; '.join(parts)}."
