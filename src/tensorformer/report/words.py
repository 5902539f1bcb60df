"""The sentences of a report: the answer, the verdicts, and what a reader must know to believe them."""

from __future__ import annotations

from tensorformer.lab.results import Comparison, Difference, Variant
from tensorformer.report import quantities as q
from tensorformer.report import series

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
    """Return the result as one sentence.

    Args:
        comparison: The finished comparison.

    Returns:
        Plain text, not escaped.
    """
    base = series.baseline_of(comparison)
    judged = [(v, v.difference) for v in series.ordered(comparison) if v.difference is not None]
    if base is None or not judged:
        levels = "; ".join(f"{v.name} reached {q.level(v.loss)} nats per token" for v in series.ordered(comparison))
        return f"{levels}. There is nothing to compare it with."
    head = f"Against {base.name} ({q.level(base.loss)} nats per token, {count(base.loss.n, 'seed')})"
    if len(judged) <= SPELLED_OUT:
        return f"{head}: {'; '.join(clause(v, d, comparison.delta) for v, d in judged)}."
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
    return f"{head}: {'; '.join(parts)}."


def matching(comparison: Comparison) -> str:
    """Return how the variants were made comparable, and how far they still are apart."""
    if comparison.match == "none":
        return (
            "Nothing was matched: the variants differ in parameters and in FLOPs, so a difference may be one of size."
        )
    what = {"params": "parameters", "flops": "training FLOPs per token"}[comparison.match]
    others = [v for v in comparison.variants if v.name != comparison.baseline]
    text = f"Matched in {what}: widths were solved for, to within {100 * comparison.tolerance:g} % of the baseline"
    if not others:
        return f"{text}."
    far = max(others, key=lambda v: abs(v.remainder))
    return f"{text}; the largest remainder is {q.percent(far.remainder)} ({far.name})."


def inference(comparison: Comparison) -> list[str]:
    """Return how the intervals and verdicts were made."""
    seeds = len(comparison.seeds)
    if seeds < 2:
        return [
            "One seed: there is no interval and no verdict. A difference here may be chance; add seeds to the recipe."
        ]
    plural = count(seeds, "seed")
    return [
        f"Intervals are {LEVEL} t-intervals over {plural}. A seed fixes the order of the tokens for all variants "
        "alike, so a difference is taken seed by seed; its interval is often narrower than those of the two losses.",
        "A variant is better or worse when a two-sided paired t-test finds a difference at 5\u202f%; it is the same "
        f"when two one-sided tests put the difference inside ±δ = {comparison.delta:g} nats per token, below which the "
        "recipe says that a difference does not matter; else it is undecided, which is not the same as equal.",
        "Both tests are corrected for the number of variants by Holm’s method. The intervals are not corrected: one "
        "that leaves out zero may stand beside “undecided”.",
        "“≈ N seeds would decide” is the total that would settle it in 8 of 10 experiments, if the difference and "
        "its spread are as measured.",
    ]


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


def notes(comparison: Comparison) -> list[str]:
    """Return everything a reader must know before believing the table.

    Args:
        comparison: The finished comparison.

    Returns:
        The comparison's own notes first, then how it was judged; plain text, not escaped.
    """
    found = [*comparison.notes, matching(comparison)]
    found.append(
        f"All variants read the same {comparison.tokens:,} tokens in the same order, seed by seed, in windows of "
        f"{comparison.context:,} tokens; losses are means over the validation part, in nats per token."
    )
    others = [v for v in comparison.variants if v.name != comparison.baseline]
    if others:
        found += inference(comparison)
        if all(v.data_to_match is None for v in others):
            found.append(
                "Data to match is absent: the baseline was trained at one length only. "
                "Set data_to_match = true under [compare] to have it."
            )
        else:
            found.append(
                "Data to match is the training data a variant needs for the baseline’s loss, relative to the baseline, "
                "read from the baseline’s own losses at other training lengths; “<” and “>” mark where those lengths "
                "end before the answer. Time to match is the same in training time."
            )
    return found + edges(comparison)
