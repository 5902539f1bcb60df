"""What a person sees while runs are being trained."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tensorformer.cli.show import console
from tensorformer.lab.compare import Watcher
from tensorformer.lab.optim import n_steps
from tensorformer.lab.pool import Event, Task

PLAIN_EVERY = 15.0  # seconds between lines where there is no terminal to redraw


class Live:
    """One bar for everything and one for each run at work; plain lines where output is not a terminal."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[note]}", markup=False),
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
            console.print(f"{event.label}: {event.message}", soft_wrap=True)
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
