"""The sentences of a report: the answer, the verdicts, and what a reader must know to believe them."""

from __future__ import annotations

from tensorformer.lab.results import Comparison, Difference, Variant
from tensorformer.report import expert_series, series
from tensorformer.report import quantities as q

SPELLED_OUT = 4  # variants whose numbers the answer names; of more, it says how many are what
LEVEL = "95\u202f%"


def count(n: int, noun: str) -> str:
    """Return ``3 seeds`` or ``1 seed``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def verdict(difference: Difference, delta: float) -> tuple[str, str]:
    """Return the verdict in words, and what would settle an open one."""
    if difference.verdict == "same":
        return f"same within δ\u202f=\u202f{delta:g}", ""
    if difference.verdict != "undecided":
        return difference.verdict, ""
    if difference.estimate.low is None:
        return "undecided", "one seed has no interval"
    if difference.seeds_to_decide is None:
        return "undecided", "over 1,000 seeds to decide"
    return "undecided", f"≈ {difference.seeds_to_decide:,} seeds would decide"


def clause(variant: Variant, difference: Difference, delta: float) -> str:
    """Return one variant's part of the answer."""
    found, open_ = verdict(difference, delta)
    estimate = difference.estimate
    said = f"{q.signed(estimate.mean, q.decimals(estimate))}\u202fnats"
    if estimate.low is not None:
        said += f", {LEVEL} {q.interval(estimate)}"
    if open_:
        said += f"; {open_}"
    return f"{variant.name} is {'the ' if difference.verdict == 'same' else ''}{found} ({said})"


def answer(comparison: Comparison) -> str:
    """Return the result as one sentence, and a probe's accuracies as another.

    Args:
        comparison: The finished comparison.

    Returns:
        Plain text, not escaped.
    """
    unit, accuracy = series.unit(comparison), _accuracy(comparison)
    base = series.baseline_of(comparison)
    judged = [(v, v.difference) for v in series.ordered(comparison) if v.difference is not None]
    if base is None or not judged:
        levels = "; ".join(f"{v.name} reached {q.level(v.loss)} {unit}" for v in series.ordered(comparison))
        return f"{levels}. There is nothing to compare it with.{accuracy}"
    head = f"Against {base.name} ({q.level(base.loss)} {unit}, {count(base.loss.n, 'seed')})"
    if len(judged) <= SPELLED_OUT:
        return f"{head}: {'; '.join(clause(v, d, comparison.delta) for v, d in judged)}.{accuracy}"
    said = {
        "better": "better",
        "same": f"the same within δ\u202f=\u202f{comparison.delta:g}",
        "worse": "worse",
        "undecided": "undecided",
    }
    label = series.labels(comparison)
    parts = []
    for kind, words in said.items():
        names = [label[v.name] for v, d in judged if d.verdict == kind]
        if names:
            parts.append(
                f"{len(names)} of {len(judged)} {'is' if len(names) == 1 else 'are'} {words} ({', '.join(names)})"
            )
    return f"{head}: {'; '.join(parts)}.{accuracy}"


def _accuracy(comparison: Comparison) -> str:
    """Return the sentence on a probe's accuracies with a space before it, or nothing."""
    probe, label = comparison.probe, series.labels(comparison)
    if probe is None:
        return ""
    found = ", ".join(
        f"{label[v.name]} {q.share(v.context_accuracies[comparison.context].mean)}" for v in series.ordered(comparison)
    )
    return (
        f" Right answers: {found}; a perfect learner gives {q.share(probe.perfect[comparison.context])}, "
        f"a guess {q.share(probe.chance)}."
    )


def inference(comparison: Comparison) -> list[str]:
    """Return how the intervals and verdicts were made."""
    return [
        f"Intervals are {LEVEL} t-intervals over {count(len(comparison.seeds), 'seed')}. A difference is taken seed by "
        "seed, because a seed fixes the order of the tokens for all variants alike; its interval is often narrower "
        "than those of the two losses.",
        f"A variant is the same when two one-sided tests put its difference inside ±δ = {comparison.delta:g} "
        f"{series.unit(comparison)}, below which the recipe says that a difference does not matter, be it significant "
        "or not. Otherwise it is better or worse when a two-sided paired t-test finds a difference at 5\u202f%, and "
        "undecided when neither test does, which is not the same as equal.",
        "Both tests are corrected for the number of variants by Holm’s method. The intervals are not corrected: one "
        "that leaves out zero may stand beside “undecided”.",
        "“≈ N seeds would decide” is the total that would settle it in 8 of 10 experiments, if the difference and "
        "its spread are as measured.",
    ]


def lucky(comparison: Comparison) -> list[str]:
    """Return a warning for each verdict that would take more seeds to find again in 8 of 10 experiments."""
    found = []
    for variant in series.ordered(comparison):
        difference = variant.difference
        if difference is None or difference.verdict == "undecided" or difference.estimate.low is None:
            continue
        needed = difference.seeds_to_decide
        if needed is None or needed > difference.estimate.n:
            seeds = "over 1,000 seeds" if needed is None else f"≈ {needed:,} seeds"
            found.append(
                f"{variant.name}: the verdict “{difference.verdict}” came with luck; "
                f"to find it in 8 of 10 experiments would take {seeds}."
            )
    return found


def edges(comparison: Comparison) -> list[str]:
    """Return a warning for each variant whose learning rate is the smallest or largest tried."""
    found = []
    for variant in series.ordered(comparison):
        tried = sorted(float(rate) for rate in variant.learning_rate_losses)
        if len(tried) > 1 and variant.learning_rate in (tried[0], tried[-1]):
            end = "smallest" if variant.learning_rate == tried[0] else "largest"
            rate = q.learning_rate(variant.learning_rate)
            found.append(
                f"{variant.name}: the chosen learning rate, {rate}, is the {end} tried; a better one may lie beyond."
            )
    return found


def experts(comparison: Comparison) -> list[str]:
    """Return what the statistics of experts mean, where a variant has any."""
    if len(expert_series.without(comparison)) == len(comparison.variants):
        return []
    return [
        "Experts are judged by one batch of the validation part. Load: the share of the choices that falls on each "
        "routed expert of a layer. Load entropy: that of the load over the log of the number of experts; 1 is even, 0 "
        "is all on one. Fullest: the largest load over an even one. Confidence: the router’s largest probability, mean "
        "over tokens. Similarity: the cosine between what two routed experts write for one token, mean over pairs; "
        "1: all do the same, 0: nothing in common. Routed share: ‖routed‖ / (‖routed‖ + ‖shared‖) of what the two "
        "paths write, mean over tokens."
    ]


def notes(comparison: Comparison) -> list[str]:
    """Return everything a reader must know before believing the table.

    Args:
        comparison: The finished comparison.

    Returns:
        The comparison's own notes first, then how it was judged; plain text, not escaped.
    """
    found = [*comparison.notes]
    others = [v for v in comparison.variants if v.name != comparison.baseline]
    if others and len(comparison.seeds) > 1:
        found += inference(comparison)
    if others and all(v.data_to_match is None for v in others):
        found.append(
            "Data to match is absent: the baseline was trained at one length only. "
            "Set data_to_match = true under [compare] to have it."
        )
    elif others:
        found.append(
            "Data to match is the training data a variant needs for the baseline’s loss, relative to the baseline, "
            "read from the baseline’s own losses at other training lengths; “<” and “>” mark where those lengths "
            "end before the answer. Time to match multiplies it by the ratio of the measured times of a step."
        )
    return found + experts(comparison) + lucky(comparison) + edges(comparison)
