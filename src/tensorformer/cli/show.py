"""Tables for the terminal: what would be trained, and what came out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tensorformer.config.schema import Recipe
from tensorformer.config.widths import widths
from tensorformer.data.examples import Examples, open_examples
from tensorformer.data.prepare import Corpus
from tensorformer.lab.device import pick
from tensorformer.lab.optim import n_steps
from tensorformer.lab.plan import Planned, check_fits
from tensorformer.lab.results import Comparison, Difference
from tensorformer.lab.timing import step_seconds


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # which the command line takes for the end, not for a fault


# Names and paths may hold brackets; and a file or a pipe has no width that a table would have to be cut to.
_has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
console = _Console(highlight=False, markup=False, width=None if _has_width else 120)
EXTRA_BUDGETS = 2.5  # data-to-match trains the baseline at 0.5× and 2× as well


def show_plan(recipe: Recipe, planned: list[Planned], runs: Path, device: str, jobs: int) -> None:
    """Print what a comparison would train, and the time it would take, from a few steps of each variant."""
    compare, train = recipe.compare, recipe.train
    assert compare is not None
    examples = open_examples(recipe.data)
    check_fits(examples, planned, compare.contexts)
    if pick(device).type == "cpu":
        torch.set_num_threads(1)  # as the runs will have
    with console.status("timing a few steps of each variant"):
        seconds = step_seconds({p.name: p.run for p in planned}, examples, pick(device), rounds=2)
    sparse = any(p.n_active != p.n_params for p in planned)
    table = _table("variant", "parameters", *(["active"] if sparse else []), "off by", "d_ff", "MFLOP/token", "s/step")
    for p in planned:
        active = [f"{p.n_active:,}"] if sparse else []
        width = ", ".join(f"{w:,}" for w in widths(p.run.model).values())
        flops = f"{p.flops_per_token / 1e6:.2f}"
        table.add_row(p.name, f"{p.n_params:,}", *active, f"{p.remainder:+.2%}", width, flops, f"{seconds[p.name]:.3f}")
    console.print(table)
    each = len(compare.seeds) + max(0, len(compare.learning_rates) - 1)
    n_runs = each * len(planned) + (2 * len(compare.seeds) if compare.data_to_match else 0)
    total = each * n_steps(train) * sum(seconds.values())
    extra = ""
    if compare.data_to_match:
        total += EXTRA_BUDGETS * len(compare.seeds) * n_steps(train) * seconds[compare.baseline]
        extra = ", the baseline at 0.5× and 2× that as well"
    console.print(
        f"{n_runs} runs of {train.tokens:,} tokens ({n_steps(train):,} steps of {train.batch_size} × {train.context}), "
        f"seeds {', '.join(map(str, compare.seeds))}{extra}",
        soft_wrap=True,
    )
    console.print(_described(examples), soft_wrap=True)
    at_once = min(jobs, each * len(planned))
    console.print(
        f"about {_duration(total / at_once)} of training here, {at_once} side by side, and a fifth to a half more for "
        f"evaluation; into {runs / recipe.name}",
        soft_wrap=True,
    )


def _described(examples: Examples) -> str:
    if not isinstance(examples, Corpus):
        return f"probe {examples.task.name}: {examples.task.description}, {examples.vocab_size:,} tokens to tell apart"
    return (
        f"corpus {examples.source}: {len(examples.train.tokens):,} training tokens, "
        f"{len(examples.validation.tokens):,} validation tokens ({examples.tokenizer.description})"
    )


def show_results(comparison: Comparison, page: Path) -> None:
    """Print the short table of a finished comparison and where the page is."""
    unit, accuracy = ("token", []) if comparison.probe is None else ("answer", ["accuracy"])
    table = _table("variant", f"loss (nats/{unit})", *accuracy, f"vs {comparison.baseline} (95 %)", "verdict")
    for v in comparison.variants:
        half = "" if v.loss.high is None else f" ± {v.loss.high - v.loss.mean:.3f}"
        compared = ("", "") if v.difference is None else (_interval(v.difference), _verdict(v.difference, comparison))
        right = [f"{v.context_accuracies[comparison.context].mean:.1%}"] if comparison.probe else []
        table.add_row(v.name, f"{v.loss.mean:.3f}{half}", *right, *compared)
    console.print(table)
    console.print(f"\nThe page: {page}", soft_wrap=True)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for header in others:
        table.add_column(header, justify="right")
    return table


def _interval(d: Difference) -> str:
    e = d.estimate
    return f"{e.mean:+.3f}" if e.low is None or e.high is None else f"{e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"


def _verdict(d: Difference, comparison: Comparison) -> str:
    if d.verdict == "same":
        return f"same within {comparison.delta:g}"
    if d.verdict == "undecided" and d.seeds_to_decide:
        return f"undecided, ≈{d.seeds_to_decide} seeds"
    return d.verdict


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
