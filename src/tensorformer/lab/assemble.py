"""Putting the runs of a comparison together into its results."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import msgspec
import torch

from tensorformer import __version__
from tensorformer.config.load import to_toml
from tensorformer.config.schema import Recipe
from tensorformer.config.widths import widths
from tensorformer.data.batches import scored_tokens
from tensorformer.data.examples import Examples
from tensorformer.data.prepare import Corpus
from tensorformer.data.probes import GeneratedProbe
from tensorformer.lab import statistics
from tensorformer.lab.device import cores
from tensorformer.lab.plan import Planned
from tensorformer.lab.results import MATCHED_IN, Comparison, Difference, Ratio, SeedResult, Variant
from tensorformer.lab.results import Corpus as CorpusFacts
from tensorformer.lab.results import Probe as ProbeFacts


class Cost(msgspec.Struct, frozen=True):
    """What a training step takes."""

    seconds: float
    peak_memory: int  # bytes


def assemble(
    recipe: Recipe,
    recipe_path: str,
    examples: Examples,
    chosen: list[Planned],
    runs: dict[str, list[SeedResult]],
    grids: dict[str, dict[float, float]],
    curve: dict[int, dict[int, float]],
    cost: dict[str, Cost],
    conditions: dict[str, str],
) -> Comparison:
    """Return the results of a comparison whose runs have all finished.

    Args:
        recipe: with its ``[compare]`` table.
        recipe_path: where it was read from, for the page to say.
        examples: the text, or the probe.
        chosen: the variants at the learning rates they were judged at, baseline first.
        runs: variant -> its finished runs.
        grids: variant -> learning rate -> loss on the tuning part; empty without a grid.
        curve: seed -> tokens -> the baseline's final loss; empty without data-to-match.
        cost: variant -> what a training step takes.
        conditions: under which the runs were trained, as label -> text.
    """
    assert recipe.compare is not None
    compare, train = recipe.compare, recipe.train
    losses = {name: {r.seed: r.loss for r in results} for name, results in runs.items()}
    baseline = losses.pop(compare.baseline)
    differences = statistics.compare_all(baseline, losses, compare.delta) if losses else {}
    variants = []
    for p in chosen:
        ratio = statistics.data_to_match(curve, losses[p.name], train.tokens) if curve and p.name in losses else None
        slower = cost[p.name].seconds / cost[compare.baseline].seconds
        variants.append(_variant(p, runs[p.name], grids[p.name], differences.get(p.name), ratio, slower, cost[p.name]))
    budgets = next(iter(curve.values()), {})
    lengths = [c * train.context for c in compare.contexts]
    return Comparison(
        name=recipe.name,
        recipe_path=recipe_path,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        baseline=compare.baseline,
        match=compare.match,
        tolerance=compare.tolerance,
        delta=compare.delta,
        tokens=train.tokens,
        context=train.context,
        seeds=list(compare.seeds),
        corpus=_corpus_facts(examples, lengths, train.final_tokens) if isinstance(examples, Corpus) else None,
        machine=machine() | conditions,
        variants=variants,
        notes=_notes(recipe, chosen),
        baseline_curve={t: statistics.estimate([c[t] for c in curve.values()]) for t in budgets},
        probe=_probe_facts(examples, lengths, train.final_tokens) if isinstance(examples, GeneratedProbe) else None,
    )


def _variant(
    p: Planned,
    seeds: list[SeedResult],
    grid: dict[float, float],
    difference: Difference | None,
    ratio: Ratio | None,
    slower: float,
    cost: Cost,
) -> Variant:
    train = p.run.train
    bits = [r.bits_per_byte for r in seeds if r.bits_per_byte is not None]
    accuracies = {n: [r.context_accuracies[n] for r in seeds] for n in seeds[0].context_accuracies}
    return Variant(
        name=p.name,
        description=p.description,
        n_params=p.n_params,
        n_active=p.n_active,
        flops_per_token=p.flops_per_token,
        widths=widths(p.run.model),
        remainder=p.remainder,
        learning_rate=train.optimizer.lr,
        learning_rate_losses={f"{lr:g}": loss for lr, loss in grid.items()},
        loss=statistics.estimate([r.loss for r in seeds]),
        bits_per_byte=statistics.estimate(bits) if bits else None,
        difference=difference,
        data_to_match=ratio,
        time_to_match=statistics.scale(ratio, slower) if ratio else None,
        context_losses={n: statistics.estimate([r.context_losses[n] for r in seeds]) for n in seeds[0].context_losses},
        step_seconds=cost.seconds,
        tokens_per_second=train.batch_size * train.context / cost.seconds,
        peak_memory=cost.peak_memory,
        seeds=seeds,
        config=to_toml(p.run).removeprefix("seed = 0\n").lstrip(),
        context_accuracies={n: statistics.estimate(values) for n, values in accuracies.items()},
    )


def _notes(recipe: Recipe, chosen: list[Planned]) -> list[str]:
    assert recipe.compare is not None
    compare, notes = recipe.compare, []
    largest = max(chosen, key=lambda p: abs(p.remainder))
    if compare.match == "none":
        spread = ", ".join(f"{p.name} {p.n_params:,}" for p in chosen)
        notes.append(f"Nothing was matched: the variants differ in size ({spread} parameters).")
    else:
        causally = " a token, scores counted causally" if compare.match == "flops" else ""
        what = MATCHED_IN[compare.match] + causally
        notes.append(f"Matched in {what}; the largest remainder is {largest.remainder:+.2%} ({largest.name}).")
    notes.append("Every variant saw the same tokens in the same order at the same seed.")
    if recipe.data.probe is not None:
        notes.append(
            "The examples are generated: every training step has new ones, and those that the runs are judged on are a "
            "draw of their own."
        )
    if compare.learning_rates:
        notes.append(
            "Each variant was trained at the learning rate of the grid that was best for it on the tuning part, "
            f"which the final losses never see; the grid was tried at seed {compare.seeds[0]}."
        )
    elif len({p.run.train.optimizer.lr for p in chosen}) == 1:
        notes.append("All variants were trained at one learning rate; another rate may favour another variant.")
    if len(compare.seeds) == 1:
        notes.append("One seed: there is no interval, and no verdict can be given.")
    return notes


def _corpus_facts(corpus: Corpus, lengths: list[int], limit: int) -> CorpusFacts:
    return CorpusFacts(
        source=corpus.source,
        tokenizer=corpus.tokenizer.description,
        vocab_size=corpus.vocab_size,
        train_documents=corpus.train.n_documents,
        train_tokens=len(corpus.train.tokens),
        validation_documents=corpus.validation.n_documents,
        validation_tokens=len(corpus.validation.tokens),
        validation_tokens_used=scored_tokens(corpus.validation.tokens, limit, max(lengths)),
    )


def _probe_facts(probe: GeneratedProbe, lengths: list[int], limit: int) -> ProbeFacts:
    found = {n: probe.perfect("validation", n, limit) for n in lengths}
    return ProbeFacts(
        name=probe.task.name,
        description=probe.task.description,
        vocab_size=probe.vocab_size,
        answers={n: count for n, (_, count) in found.items()},
        chance=probe.task.chance,
        perfect={n: accuracy for n, (accuracy, _) in found.items()},
    )


def machine() -> dict[str, str]:
    """Return what the runs were trained on, as label -> text."""
    return {
        "processor": _processor(),
        "cores": str(cores()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tensorformer": __version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
