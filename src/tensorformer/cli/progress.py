"""What a person sees while a comparison works, and at its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tensorformer.config.match import widths
from tensorformer.config.schema import Recipe
from tensorformer.data.prepare import prepare
from tensorformer.lab.compare import Watcher, check_fits
from tensorformer.lab.device import pick
from tensorformer.lab.optim import n_steps
from tensorformer.lab.plan import Planned
from tensorformer.lab.pool import Event, Task
from tensorformer.lab.results import Comparison, Difference
from tensorformer.lab.timing import step_seconds

console = Console(highlight=False)
PLAIN_EVERY = 15.0  # seconds between lines where there is no terminal to redraw


class Live:
    """One bar for everything and one for each run at work; plain lines where output is not a terminal."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._steps: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._runs: dict[str, TaskID] = {}
        self._all: TaskID | None = None
        self._timing: TaskID | None = None
        self._last_line = time.monotonic()
        self.watcher = Watcher(self._tasks, self._event, self._time)

    def __enter__(self) -> Live:
        self._bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bars.stop()

    def _tasks(self, tasks: list[Task]) -> None:
        self._steps = {t.label: n_steps(t.run.train) for t in tasks}
        self._done = dict.fromkeys(self._steps, 0)
        if self._all is not None:
            self._bars.remove_task(self._all)
            self._all = None
        if tasks:
            self._all = self._bars.add_task(f"{len(tasks)} runs", total=sum(self._steps.values()), note="")

    def _event(self, event: Event) -> None:
        if event.progress:
            p = event.progress
            self._done[event.label] = p.step
            if event.label not in self._runs:
                self._runs[event.label] = self._bars.add_task(event.label, total=p.steps, note="")
            note = f"loss {p.loss:.3f}  {p.tokens_per_second:,.0f} tokens/s"
            self._bars.update(self._runs[event.label], completed=p.step, note=note)
        if event.kind in ("finished", "failed", "diverged"):
            self._done[event.label] = self._steps.get(event.label, 0)
            if event.label in self._runs:
                self._bars.remove_task(self._runs.pop(event.label))
        if event.kind in ("failed", "diverged"):
            console.print(f"{event.label}: {event.message}", markup=False, soft_wrap=True)
        done, total = sum(self._done.values()), sum(self._steps.values())
        if self._all is not None:
            self._bars.update(self._all, completed=done)
        if not console.is_terminal and (time.monotonic() - self._last_line > PLAIN_EVERY or done == total):
            self._last_line = time.monotonic()
            console.print(f"{done:,} of {total:,} steps done", soft_wrap=True)

    def _time(self, done: int, of: int) -> None:
        if self._timing is None:
            self._timing = self._bars.add_task("timing, in turn", total=of, note="")
        self._bars.update(self._timing, completed=done)


def show_plan(recipe: Recipe, planned: list[Planned], runs: Path, device: str, jobs: int) -> None:
    """Print what a comparison would train, and an estimate of the time from a few steps of each variant."""
    compare, train = recipe.compare, recipe.train
    assert compare is not None
    corpus = prepare(recipe.data)
    check_fits(corpus, planned[0].run, compare.contexts)
    table = Table("variant", box=None, pad_edge=False, header_style="bold")
    for header in ("parameters", "off by", "d_ff", "FLOPs/token", "s/step"):
        table.add_column(header, justify="right")
    with console.status("timing a few steps of each variant"):
        seconds = step_seconds({p.name: p.run for p in planned}, corpus, pick(device), rounds=2)
    for p in planned:
        width = ", ".join(f"{w:,}" for w in widths(p.run.model).values())
        table.add_row(
            p.name,
            f"{p.n_params:,}",
            f"{p.remainder:+.2%}",
            width,
            f"{p.flops_per_token / 1e6:.2f} M",
            f"{seconds[p.name]:.3f}",
        )
    console.print(table)
    per_variant = len(compare.seeds) + max(0, len(compare.learning_rates) - 1)
    runs_of = {p.name: per_variant for p in planned}
    # 0.5× and 2× the tokens on top of 1×: in steps, 2.5 more runs of the baseline
    equivalents = sum(runs_of.values()) + (2.5 * len(compare.seeds) if compare.data_to_match else 0)
    total = n_steps(train) * sum(seconds[p.name] * runs_of[p.name] for p in planned)
    if compare.data_to_match:
        total += 2.5 * len(compare.seeds) * n_steps(train) * seconds[compare.baseline]
    console.print(
        f"{sum(runs_of.values())} runs of {train.tokens:,} tokens ({n_steps(train):,} steps of "
        f"{train.batch_size} × {train.context}), seeds {', '.join(map(str, compare.seeds))}"
        + (
            f"; data-to-match adds the baseline at 0.5× and 2×: {equivalents:.0f} runs' worth"
            if compare.data_to_match
            else ""
        ),
        soft_wrap=True,
    )
    console.print(
        f"corpus {corpus.source}: {len(corpus.train.tokens):,} training tokens, "
        f"{len(corpus.validation.tokens):,} validation tokens ({corpus.tokenizer.description})",
        soft_wrap=True,
    )
    console.print(
        f"about {_duration(total)} of training here, {jobs} side by side, into {runs / recipe.name}", soft_wrap=True
    )


def show_results(comparison: Comparison, page: Path) -> None:
    """Print the short table of a finished comparison and where the page is."""
    table = Table("variant", box=None, pad_edge=False, header_style="bold")
    for header in ("parameters", "loss (nats/token)", "vs " + comparison.baseline, "verdict", "tokens/s"):
        table.add_column(header, justify="right")
    for v in comparison.variants:
        half = "" if v.loss.high is None else f" ± {v.loss.high - v.loss.mean:.3f}"
        table.add_row(
            v.name,
            f"{v.n_params:,}",
            f"{v.loss.mean:.4f}{half}",
            "" if v.difference is None else _interval(v.difference),
            "" if v.difference is None else _verdict(v.difference, comparison.delta),
            f"{v.tokens_per_second:,.0f}",
        )
    console.print(table)
    console.print(f"\nThe page: {page}", soft_wrap=True)


def _interval(d: Difference) -> str:
    e = d.estimate
    return f"{e.mean:+.4f}" if e.low is None or e.high is None else f"{e.mean:+.4f} [{e.low:+.3f}, {e.high:+.3f}]"


def _verdict(d: Difference, delta: float) -> str:
    if d.verdict == "same":
        return f"same within {delta:g}"
    if d.verdict == "undecided" and d.seeds_to_decide:
        return f"undecided (≈ {d.seeds_to_decide} seeds)"
    return d.verdict


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
