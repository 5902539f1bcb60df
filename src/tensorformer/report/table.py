"""The tables of a report as texts: the same cells for the page and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from tensorformer.lab.results import MATCHED_IN, Comparison, Corpus, Probe, Variant
from tensorformer.report import quantities as q
from tensorformer.report import series, words


@dataclass(frozen=True)
class Cell:
    """A value, and smaller text under it."""

    main: str
    detail: str = ""


@dataclass(frozen=True)
class Column:
    """A heading, and the unit under it."""

    title: str
    unit: str = ""


@dataclass(frozen=True)
class Line:
    """One variant's row."""

    variant: Variant
    baseline: bool
    decided: bool
    cells: list[Cell]


def columns(comparison: Comparison) -> list[Column]:
    """Return the headings after the variant's own; a ratio that no variant has is left out."""
    unit = series.unit(comparison)
    found = [
        Column("Parameters"),
        Column("Compute", "training, per token"),
        Column("Final loss", unit),
        _second(comparison),
        Column("Difference", unit),
        Column("Verdict"),
        Column("Data to match", "× baseline"),
        Column("Time to match", "× baseline"),
        Column("Speed", "tokens/s"),
        Column("Peak memory"),
    ]
    if has_active(comparison):
        found.insert(1, Column("Active", "per token"))
    if all(v.data_to_match is None for v in comparison.variants if v.name != comparison.baseline):
        found = [column for column in found if column.title != "Data to match"]
    if all(v.time_to_match is None for v in comparison.variants if v.name != comparison.baseline):
        found = [column for column in found if column.title != "Time to match"]
    return found


def has_active(comparison: Comparison) -> bool:
    """Return whether a token meets fewer than all parameters of some variant."""
    return any(is_sparse(variant) for variant in comparison.variants)


def is_sparse(variant: Variant) -> bool:
    """Return whether a token meets fewer than all parameters."""
    return variant.n_active is not None and variant.n_active != variant.n_params


def matched_columns(comparison: Comparison) -> list[str]:
    """Return the columns that say under their number how far it is from the baseline's."""
    columns = {"params": ["Parameters"], "flops": ["Compute"], "none": []}
    active = {"active": ["Active"], "params_and_active": ["Parameters", "Active"]}
    if has_active(comparison):
        columns |= active
    return columns.get(comparison.match, ["Parameters"])  # in dense models all parameters are active


def _second(comparison: Comparison) -> Column:
    """Return the column beside the loss: what says the same in another measure."""
    probe = comparison.probe
    if probe is None:
        return Column("Bits per byte")
    return Column("Accuracy", f"chance {q.share(probe.chance)}")


def lines(comparison: Comparison) -> list[Line]:
    """Return the rows of the main table, the baseline first.

    Args:
        comparison: The finished comparison.

    Returns:
        Cells in the order of ``columns``; plain text, not escaped.
    """
    titles = [column.title for column in columns(comparison)]
    found = []
    for variant in series.ordered(comparison):
        is_baseline = variant.name == comparison.baseline
        cells = _cells(comparison, variant, is_baseline)
        decided = variant.difference is not None and variant.difference.verdict != "undecided"
        found.append(Line(variant, is_baseline, decided, [cells[title] for title in titles]))
    return found


def _cells(comparison: Comparison, variant: Variant, is_baseline: bool) -> dict[str, Cell]:
    apart = {} if is_baseline else _apart(comparison, variant)
    active = q.ABSENT if variant.n_active is None else q.scaled(variant.n_active, "", 0.1)
    cells = {
        "Parameters": Cell(q.scaled(variant.n_params, "", 0.1), apart.get("Parameters", "")),
        "Active": Cell(active, apart.get("Active", "")),
        "Compute": Cell(q.scaled(variant.flops_per_token, "FLOP", 0.1), apart.get("Compute", "")),
        "Final loss": Cell(*q.level_parts(variant.loss)),
        "Difference": Cell(q.ABSENT),
        "Verdict": Cell("baseline" if is_baseline else q.ABSENT),
        "Data to match": Cell(
            "1×" if is_baseline else q.ratio(variant.data_to_match), q.ratio_interval(variant.data_to_match)
        ),
        "Time to match": Cell(
            "1×" if is_baseline else q.ratio(variant.time_to_match), q.ratio_interval(variant.time_to_match)
        ),
        "Speed": Cell(q.scaled(variant.tokens_per_second, "")),
        "Peak memory": Cell(q.size(variant.peak_memory)),
    }
    if variant.bits_per_byte is not None:
        cells["Bits per byte"] = Cell(*q.level_parts(variant.bits_per_byte))
    if variant.context_accuracies:
        cells["Accuracy"] = Cell(*q.share_parts(variant.context_accuracies[comparison.context]))
    if variant.difference is not None:
        estimate = variant.difference.estimate
        span = q.interval(estimate)
        cells["Difference"] = Cell(q.signed(estimate.mean, q.decimals(estimate)), "" if span == q.ABSENT else span)
        cells["Verdict"] = Cell(*words.verdict(variant.difference, comparison.delta))
    return cells


def _apart(comparison: Comparison, variant: Variant) -> dict[str, str]:
    """Return the distance from the baseline by column: the variant's remainder, or where two are matched, either."""
    names, base = matched_columns(comparison), series.baseline_of(comparison)
    if len(names) < 2 or base is None:
        return dict.fromkeys(names, q.percent(variant.remainder))
    found = (variant.n_params / base.n_params - 1, _active(variant) / _active(base) - 1)
    return {name: q.percent(distance) for name, distance in zip(names, found, strict=True)}


def _active(variant: Variant) -> int:
    return variant.n_params if variant.n_active is None else variant.n_active


def caption(comparison: Comparison) -> str:
    """Return what stands over the table: what was measured, and what the small numbers are."""
    spread = "± and … are 95 % intervals over seeds" if len(comparison.seeds) > 1 else "one seed, so no intervals"
    under = " and ".join(name.lower() for name in matched_columns(comparison))
    apart = f"; under {under}, the distance from the baseline" if under and len(comparison.variants) > 1 else ""
    what = "loss" if comparison.probe is None else "loss and share of right answers"
    text = f"Final validation {what} after {comparison.tokens:,} training tokens in windows of {comparison.context:,}"
    active = "; active: the parameters that a token meets" if has_active(comparison) else ""
    return f"{text}; {spread}{apart}{active}."


def seed_lines(comparison: Comparison, variant: Variant) -> tuple[list[Column], list[list[str]]]:
    """Return the table of one variant's seeds: final loss, bits per byte or accuracy, difference."""
    unit = series.unit(comparison)
    heads = [Column("Seed"), Column("Final loss", unit), Column(_second(comparison).title)]
    base = series.baseline_of(comparison)
    pairs = variant.difference.per_seed if variant.difference is not None else {}
    compared = base is not variant and variant.difference is not None
    if compared:
        heads.append(Column("Difference", unit))
    body = []
    for seed in variant.seeds:
        bits, right = seed.bits_per_byte, seed.context_accuracies.get(comparison.context)
        second = q.number(bits, 4) if bits is not None else q.ABSENT if right is None else q.share(right)
        cells = [str(seed.seed), q.number(seed.loss, 4), second]
        if compared:
            cells.append(q.signed(pairs[seed.seed], 4) if seed.seed in pairs else q.ABSENT)
        body.append(cells)
    return heads, body


def rate_lines(comparison: Comparison) -> tuple[list[str], list[tuple[str, list[tuple[str, bool]]]]]:
    """Return the learning-rate grid.

    Args:
        comparison: The finished comparison.

    Returns:
        The rates tried, and for each variant its losses with whether that rate was chosen; empty without a grid.
    """
    rates = sorted({float(rate) for v in comparison.variants for rate in v.learning_rate_losses})
    body = []
    for variant in series.ordered(comparison):
        losses = {float(rate): loss for rate, loss in variant.learning_rate_losses.items()}
        if losses:
            cells = [q.number(losses[r], 4) if r in losses else q.ABSENT for r in rates]
            body.append(
                (variant.name, [(cell, r == variant.learning_rate) for cell, r in zip(cells, rates, strict=True)])
            )
    return [q.learning_rate(rate) for rate in rates], body


def facts(comparison: Comparison) -> dict[str, list[tuple[str, str]]]:
    """Return what the runs were trained on, by heading."""
    training = [
        ("Tokens", f"{comparison.tokens:,} a run"),
        ("Context", f"{comparison.context:,} tokens"),
        ("Seeds", ", ".join(str(seed) for seed in comparison.seeds)),
        ("Matched in", MATCHED_IN[comparison.match]),
        ("Tolerance", f"{100 * comparison.tolerance:g} %"),
        ("δ", f"{comparison.delta:g} {series.unit(comparison)}"),
    ]
    found = {"Training": training}
    if comparison.corpus is not None:
        found["Corpus"] = _corpus(comparison.corpus)
    if comparison.probe is not None:
        found["Probe"] = _probe(comparison.probe)
    return found | {"Machine": list(comparison.machine.items())}


def _corpus(corpus: Corpus) -> list[tuple[str, str]]:
    return [
        ("Source", corpus.source),
        ("Tokenizer", f"{corpus.tokenizer}, {corpus.vocab_size:,} tokens"),
        ("Training part", f"{corpus.train_documents:,} documents, {corpus.train_tokens:,} tokens"),
        ("Validation part", f"{corpus.validation_documents:,} documents, {corpus.validation_tokens:,} tokens"),
        ("Final loss over", f"{corpus.validation_tokens_used:,} tokens"),
    ]


def _probe(probe: Probe) -> list[tuple[str, str]]:
    by_length = [
        (f"At {n:,} tokens", f"{count:,} answers; a perfect learner gets {q.share(probe.perfect[n])}")
        for n, count in sorted(probe.answers.items())
    ]
    return [
        ("Task", probe.name),
        ("Of", probe.description),
        ("Vocabulary", f"{probe.vocab_size:,} tokens"),
        ("Chance", f"{q.share(probe.chance)}, a guess among all possible answers"),
        *by_length,
    ]
