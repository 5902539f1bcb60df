"""A comparison as the rows that charts are drawn from: plain dictionaries, one a mark."""

from __future__ import annotations

from collections.abc import Callable

from tensorformer.lab.results import Comparison, Estimate, Point, Variant
from tensorformer.report import quantities as q

Row = dict[str, str | float]

HIDDEN_SHARE = 0.2  # of the tokens, at the start of a curve: there the loss falls too far to read the end beside it
LONGEST_LABEL = 25  # characters of a name in a legend
FEWEST_POINTS = 3  # on every curve, else the start is drawn too


def ordered(comparison: Comparison) -> list[Variant]:
    """Return the variants, the baseline first."""
    return sorted(comparison.variants, key=lambda v: v.name != comparison.baseline)


def unit(comparison: Comparison) -> str:
    """Return what losses are measured in."""
    return "nats per token" if comparison.probe is None else "nats per answer"


def source(comparison: Comparison) -> str:
    """Return where the text is from, or the name of the probe."""
    return comparison.probe.name if comparison.probe else comparison.corpus.source if comparison.corpus else ""


def baseline_of(comparison: Comparison) -> Variant | None:
    """Return the baseline's results."""
    return next((v for v in comparison.variants if v.name == comparison.baseline), None)


def short(name: str) -> str:
    """Return a name cut in the middle, where it is too long for a legend."""
    if len(name) <= LONGEST_LABEL:
        return name
    half = (LONGEST_LABEL - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def labels(comparison: Comparison) -> dict[str, str]:
    """Return how figures call each variant: its name, shortened where no two become the same."""
    names = [variant.name for variant in ordered(comparison)]
    cut = {name: short(name) for name in names}
    return cut if len(set(cut.values())) == len(names) else {name: name for name in names}


def marks(comparison: Comparison) -> list[tuple[Variant, Row]]:
    """Return what every row of a variant carries: its name and label, and an id that is safe in an expression."""
    label = labels(comparison)
    variants = ordered(comparison)
    return [(v, {"variant": v.name, "label": label[v.name], "id": f"v{i}"}) for i, v in enumerate(variants)]


def common_steps(variant: Variant) -> dict[int, list[Point]]:
    """Return the evaluations that every seed has, by step."""
    by_seed = [{point.step: point for point in seed.curve} for seed in variant.seeds]
    steps = set.intersection(*(set(points) for points in by_seed)) if by_seed else set()
    return {step: [points[step] for points in by_seed] for step in sorted(steps)}


def first_drawn(comparison: Comparison) -> int:
    """Return the number of tokens at which curves begin: the first part is left out where enough remains."""
    cut = int(HIDDEN_SHARE * comparison.tokens)
    for variant in comparison.variants:
        tokens = [points[0].tokens for points in common_steps(variant).values()]
        if tokens and sum(t >= cut for t in tokens) < FEWEST_POINTS:
            return 0
    return cut


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def curves(comparison: Comparison) -> list[Row]:
    """Return the loss along training: mean over seeds, and the lowest and highest seed."""
    rows: list[Row] = []
    cut = first_drawn(comparison)
    for variant, mark in marks(comparison):
        for step, points in common_steps(variant).items():
            losses = [point.loss for point in points]
            if points[0].tokens < cut:
                continue
            rows.append(
                mark
                | {"step": step, "tokens": points[0].tokens, "loss": mean(losses)}
                | {"low": min(losses), "high": max(losses)}
                | {"seconds": step * variant.step_seconds, "measured": mean([p.seconds for p in points])}
            )
    return rows


def accuracies(comparison: Comparison) -> list[Row]:
    """Return the accuracy of a probe's answers along training: mean over seeds, and the lowest and highest seed."""
    rows: list[Row] = []
    for variant, mark in marks(comparison):
        for step, points in common_steps(variant).items():
            found = [point.accuracy for point in points if point.accuracy is not None]
            if len(found) == len(points):
                rows.append(
                    mark
                    | {"step": step, "tokens": points[0].tokens, "accuracy": mean(found)}
                    | {"low": min(found), "high": max(found)}
                )
    return rows


def gaps(comparison: Comparison) -> list[Row]:
    """Return the paired difference to the baseline along training: mean, lowest and highest over shared seeds."""
    rows: list[Row] = []
    base = baseline_of(comparison)
    if base is None:
        return rows
    losses = {(s.seed, point.step): point.loss for s in base.seeds for point in s.curve}
    cut = first_drawn(comparison)
    for variant, mark in marks(comparison):
        shared = [s.seed for s in variant.seeds]
        for step, points in common_steps(variant).items():
            found = [
                p.loss - losses[seed, step] for seed, p in zip(shared, points, strict=True) if (seed, step) in losses
            ]
            if variant is base or not found or points[0].tokens < cut:
                continue
            rows.append(
                mark
                | {"step": step, "tokens": points[0].tokens, "difference": mean(found)}
                | {"low": min(found), "high": max(found)}
            )
    return rows


def bounds(estimate: Estimate) -> Row:
    """Return the interval as fields, absent ones left out."""
    if estimate.low is None or estimate.high is None:
        return {}
    return {"low": estimate.low, "high": estimate.high}


def differences(comparison: Comparison) -> list[Row]:
    """Return one row a variant that has a difference to the baseline."""
    rows: list[Row] = []
    for variant, mark in marks(comparison):
        if variant.difference is not None:
            estimate, verdict = variant.difference.estimate, variant.difference.verdict
            text = q.signed(estimate.mean, q.decimals(estimate))
            rows.append(
                mark
                | {"difference": estimate.mean, "text": text, "interval": q.interval(estimate)}
                | {"verdict": verdict, "summary": f"{text}  {verdict}"}
                | bounds(estimate)
            )
    return rows


def seed_differences(comparison: Comparison) -> list[Row]:
    """Return one row a variant and seed."""
    return [
        mark | {"seed": seed, "difference": value}
        for variant, mark in marks(comparison)
        if variant.difference is not None and len(variant.difference.per_seed) > 1
        for seed, value in sorted(variant.difference.per_seed.items())
    ]


def contexts(comparison: Comparison) -> list[Row]:
    """Return the final loss by context length; ``at`` is the length moved a little, so that intervals do not cover."""
    return [
        row | {"loss": estimate.mean, "text": q.level(estimate)} | bounds(estimate)
        for row, estimate in _side_by_side(comparison, lambda v: v.context_losses)
    ]


def context_accuracies(comparison: Comparison) -> list[Row]:
    """Return the final accuracy of a probe's answers by context length, placed as ``contexts`` places losses."""
    return [
        row | {"accuracy": estimate.mean, "text": q.share_level(estimate)} | bounds(estimate)
        for row, estimate in _side_by_side(comparison, lambda v: v.context_accuracies)
    ]


def _side_by_side(
    comparison: Comparison, by_length: Callable[[Variant], dict[int, Estimate]]
) -> list[tuple[Row, Estimate]]:
    rows: list[tuple[Row, Estimate]] = []
    variants = marks(comparison)
    spread = min(0.035, 0.3 / max(1, len(variants)))  # octaves between neighbours
    for i, (variant, mark) in enumerate(variants):
        shift = 2.0 ** (spread * (i - (len(variants) - 1) / 2))
        for length, estimate in sorted(by_length(variant).items()):
            rows.append((mark | {"context": length, "at": length * shift}, estimate))
    return rows


def baseline_lengths(comparison: Comparison) -> list[Row]:
    """Return the baseline's final loss at each training length that data-to-match was read from."""
    return [
        marks(comparison)[0][1]
        | {"tokens": tokens, "loss": estimate.mean, "text": q.level(estimate)}
        | bounds(estimate)
        for tokens, estimate in sorted(comparison.baseline_curve.items())
    ]


def matches(comparison: Comparison) -> list[Row]:
    """Return where each variant stands, and (``equal``) the baseline tokens that give the same loss."""
    rows: list[Row] = []
    for variant, mark in marks(comparison):
        found = variant.data_to_match
        if variant.name == comparison.baseline or found is None:
            continue
        row = mark | {"tokens": comparison.tokens, "loss": variant.loss.mean}
        row |= {"text": q.level(variant.loss), "ratio": q.ratio(found), "interval": q.ratio_interval(found) or q.ABSENT}
        if not found.bound and found.value > 0:
            row["equal"] = comparison.tokens / found.value
        rows.append(row)
    return rows
