"""Which figures a report has, in order, each with the words that say how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorformer.lab.results import Comparison
from tensorformer.report import accuracy, charts, expert_series, experts, series
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
    "load_evenness",
    "routed_share",
    "expert_loads",
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
    if len({row["context"] for row in series.contexts(comparison)}) > 1:
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
    return found + _of_experts(comparison, mean, band)


def _of_experts(comparison: Comparison, mean: str, band: str) -> list[Figure]:
    """Return the figures of mixtures of experts; none where no variant has any."""
    absent = [series.labels(comparison)[name] for name in expert_series.without(comparison)]
    if len(absent) == len(comparison.variants):
        return []
    many = len(comparison.seeds) > 1
    missing = f" Without experts, so not drawn: {', '.join(absent)}." if absent else ""
    text = "on one batch of the validation part"
    bars = "Bars run from the lowest to the highest seed." if many else "One seed, so no bars."
    every, and_seeds = (", of all seeds together", " and seeds") if many else ("", "")
    apart = " Points are moved sideways a little." if len(comparison.variants) - len(absent) > 1 else ""
    return [
        Figure(
            "load_evenness",
            "Evenness of the experts’ load",
            "Entropy of the load of a layer’s routed experts over its largest value, the log of their number: 1 is "
            f"even, 0 is all on one. At each evaluation, {text}, mean over layers{and_seeds}. {band}{missing}",
            _spoken_evenness(comparison),
            experts.load_evenness,
        ),
        Figure(
            "routed_share",
            "Routed share of the output",
            "Length of what the routed experts write, over that plus the length of what the shared ones write: above "
            "the dashed line the routed ones write more, and without shared ones it is 100\u202f%. At the last "
            f"evaluation, {text}, mean over tokens{and_seeds}. {bars}{apart}{missing}",
            _spoken_routed_shares(comparison),
            experts.routed_share,
        ),
        Figure(
            "expert_loads",
            "Load of the experts, layer by layer",
            f"A bar is all routed experts of a layer{every}, the fullest first; the stronger the colour, the more "
            "choices fell on them, and where it is blank none did. 1× is an even load: were the load even, a bar would "
            f"have one shade. At the last evaluation, {text}. Beside a name: the fullest expert of any "
            f"layer{mean}.{missing}",
            _spoken_loads(comparison),
            experts.expert_loads,
        ),
    ]


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


def _spoken_evenness(comparison: Comparison) -> str:
    last = {row["variant"]: float(row["entropy"]) for row in expert_series.evenness(comparison)}
    parts = [f"{name} ends at {q.number(found, 3)}" for name, found in last.items()]
    return f"Line chart of load entropy, 1 where it is even, against training tokens. {'; '.join(parts)}."


def _spoken_routed_shares(comparison: Comparison) -> str:
    by_variant: dict[str, list[tuple[float, str]]] = {}
    for row in expert_series.routed_shares(comparison):
        share = float(row["share"])
        by_variant.setdefault(str(row["variant"]), []).append((share, f"{q.share(share)} in layer {row['layer']}"))
    parts = [f"{name} from {min(found)[1]} to {max(found)[1]}" for name, found in by_variant.items()]
    return f"Chart of the routed experts’ share of the output’s norm by layer. {'; '.join(parts)}."


def _spoken_loads(comparison: Comparison) -> str:
    parts = []
    for variant in series.ordered(comparison):
        layers = expert_series.last(variant)
        if layers:
            load, layer = expert_series.fullest(layers)
            dead = expert_series.few(expert_series.total(layers, lambda e: e.dead))
            all_ = expert_series.few(expert_series.total(layers, lambda e: len(e.load)))
            parts.append(
                f"{variant.name}: the fullest has {q.number(load, 1)} even loads, in layer {layer}; "
                f"of {all_} experts {dead} have no token"
            )
    return f"Stacked bars of the experts of each layer by their load. {'; '.join(parts)}."
