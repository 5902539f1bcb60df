"""Runs side by side: one process and one thread each, stopped together, never orphaned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tensorformer.config.schema import Run
from tensorformer.data.prepare import prepare
from tensorformer.errors import DivergenceError, TensorformerError
from tensorformer.lab.device import pick
from tensorformer.lab.train import Interrupted, Progress, train

REPORT_EVERY = 0.25  # seconds between two events of a run


class Task(NamedTuple):
    """A run to train."""

    label: str
    run: Run
    folder: Path
    contexts: tuple[int, ...] = (1,)
    tuning: bool = False
    branch_from: Path | None = None


class Event(NamedTuple):
    """Something that happened to a task."""

    label: str
    kind: str  # "started", "progress", "finished", "failed", "diverged"
    progress: Progress | None = None
    message: str = ""
    details: str = ""  # a traceback, where the fault is ours


def run_all(chains: list[list[Task]], jobs: int, device: str, on_event: Callable[[Event], None]) -> dict[str, Event]:
    """Train every chain of tasks, ``jobs`` chains at a time; the tasks of a chain follow one another.

    Ctrl-C lets every run write a checkpoint and stop; a second one ends them at once.

    Args:
        chains: tasks in order; a later one of a chain may branch off an earlier one.
        jobs: processes side by side.
        device: by name, as ``device.pick`` takes it.
        on_event: told of everything, in this process.

    Returns:
        The tasks that failed, by label.

    Raises:
        KeyboardInterrupt: after all have stopped.
    """
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    stop = context.Event()
    waiting, running, failed = list(chains), dict[int, tuple[BaseProcess, list[Task]]](), dict[str, Event]()
    settled: set[str] = set()
    interrupts = 0

    def drain(timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                event: Event = events.get(timeout=timeout)
                timeout = 0.0
                if event.kind in ("failed", "diverged"):
                    failed[event.label] = event
                if event.kind in ("finished", "failed", "diverged"):
                    settled.add(event.label)
                on_event(event)

    while waiting or running:
        try:
            while waiting and len(running) < jobs and not stop.is_set():
                chain = waiting.pop(0)
                process = context.Process(target=_work, args=(chain, device, events, stop), daemon=True)
                with _children_ignore_interrupts():
                    process.start()
                assert process.pid is not None
                running[process.pid] = (process, chain)
            drain(timeout=0.1)
            for pid, (process, chain) in list(running.items()):
                if process.is_alive():
                    continue
                process.join()
                drain(timeout=0.2)
                del running[pid]
                lost = [t for t in chain if t.label not in settled]
                if lost and not stop.is_set():
                    event = Event(lost[0].label, "failed", message=_how_it_ended(process, lost[0]))
                    failed[event.label] = event
                    on_event(event)
            if stop.is_set() and not running:
                break
        except KeyboardInterrupt:
            interrupts += 1
            stop.set()
            if interrupts > 1:
                for process, _ in running.values():
                    process.terminate()
    if interrupts:
        raise KeyboardInterrupt
    return failed


def _work(chain: list[Task], device_name: str, events: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    last = 0.0

    def should_stop() -> bool:
        return stop.is_set() or (parent is not None and not parent.is_alive())

    for task in chain:
        if should_stop():
            return

        def tell(progress: Progress, label: str = task.label) -> None:
            nonlocal last
            if time.monotonic() - last > REPORT_EVERY or progress.step == progress.steps:
                last = time.monotonic()
                events.put(Event(label, "progress", progress))

        events.put(Event(task.label, "started"))
        try:
            train(
                task.run,
                task.folder,
                prepare(task.run.data),
                pick(device_name),
                contexts=task.contexts,
                tuning=task.tuning,
                branch_from=task.branch_from,
                on_progress=tell,
                should_stop=should_stop,
            )
            events.put(Event(task.label, "finished"))
        except Interrupted:
            return
        except DivergenceError as e:
            events.put(Event(task.label, "diverged", message=str(e)))
            return
        except TensorformerError as e:
            events.put(Event(task.label, "failed", message=str(e)))
            return
        except Exception as e:
            message = f"{type(e).__name__}: {e}".splitlines()[0]
            events.put(Event(task.label, "failed", message=message, details=traceback.format_exc()))
            return


@contextlib.contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    # A terminal sends Ctrl-C to every process of the group; only the parent may answer it. An ignored signal stays
    # ignored across exec, also while the child is still importing.
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread: no handler to shield
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _how_it_ended(process: BaseProcess, task: Task) -> str:
    code = process.exitcode or 0
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    hint = "; out of memory? lower --jobs" if code == -getattr(signal, "SIGKILL", 9) else ""
    return f"{task.folder}: its process {how}{hint}; the same command goes on from the last checkpoint"


def default_jobs(device: str) -> int:
    """Return how many runs fit side by side: a core each, or one on an accelerator."""
    return 1 if pick(device).type != "cpu" else max(1, len(os.sched_getaffinity(0)))
