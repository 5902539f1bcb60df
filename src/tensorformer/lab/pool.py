"""Runs side by side: one process and one thread each, stopped together, never orphaned.

Every process has a pipe of its own and shares no lock with another, so that one that is killed, by whatever, can hold
none of the others up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, cast

import torch

from tensorformer.config.schema import Run
from tensorformer.data.examples import open_examples
from tensorformer.errors import DivergenceError, TensorformerError
from tensorformer.lab.device import pick
from tensorformer.lab.interrupt import interrupts_ignored, interrupts_noted
from tensorformer.lab.train import Interrupted, Progress, train

REPORT_EVERY = 0.25  # seconds between two events of a run
LOOK_EVERY = 0.2  # seconds after which Ctrl-C is looked for


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
    kind: str  # "progress", "finished", "failed", "diverged"
    progress: Progress | None = None
    message: str = ""
    details: str = ""  # a traceback, where the fault is ours


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection  # events come out of it; anything sent into it asks the process to stop
    chain: list[Task]
    ended: set[str]  # labels of tasks that have finished or failed


def run_all(chains: list[list[Task]], jobs: int, device: str, on_event: Callable[[Event], None]) -> dict[str, Event]:
    """Train every chain of tasks, ``jobs`` chains at a time; the tasks of a chain follow one another.

    Ctrl-C lets every run write a checkpoint and stop; a second one ends them at once.

    Args:
        chains: tasks in order; a later one of a chain may branch off an earlier one.
        jobs: processes side by side.
        device: by name, as ``device.pick`` takes it.
        on_event: told of everything, in this process.

    Returns:
        The tasks that failed, by label; what followed them in their chains was not tried.

    Raises:
        KeyboardInterrupt: after all have stopped.
    """
    waiting, running, failed = list(chains), list[_Worker](), dict[str, Event]()
    asked_to_stop = False

    def tell(event: Event) -> None:
        if event.kind in ("failed", "diverged"):
            failed[event.label] = event
        on_event(event)

    with interrupts_noted() as interrupted:
        try:
            while running or (waiting and not interrupted()):
                while waiting and len(running) < jobs and not interrupted():
                    running.append(_start(waiting.pop(0), device))
                if interrupted() and not asked_to_stop:
                    asked_to_stop = True
                    for worker in running:
                        with contextlib.suppress(OSError):
                            worker.pipe.send("stop")
                wait([w for worker in running for w in (worker.pipe, worker.process.sentinel)], timeout=LOOK_EVERY)
                for worker in list(running):
                    gone = not worker.process.is_alive()  # before reading: what it sent last is then in the pipe
                    for event in _received(worker):
                        tell(event)
                    if gone:
                        running.remove(worker)
                        lost = next((t for t in worker.chain if t.label not in worker.ended), None)
                        broke_off = any(t.label in failed for t in worker.chain)
                        if lost and not broke_off and not (asked_to_stop and worker.process.exitcode == 0):
                            tell(Event(lost.label, "failed", message=_how_it_ended(worker.process, lost)))
                        worker.pipe.close()
        finally:
            for worker in running:  # left by a second Ctrl-C, or by a fault in ``on_event``
                worker.process.terminate()
        if interrupted():
            raise KeyboardInterrupt
    return failed


def _start(chain: list[Task], device: str) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(chain, device, theirs), daemon=True)
    # A terminal sends Ctrl-C to every process of the group; only the parent may answer it. An ignored signal stays
    # ignored across exec, also while the child is still importing.
    with interrupts_ignored():
        process.start()
    theirs.close()
    return _Worker(process, ours, chain, set())


def _received(worker: _Worker) -> Iterator[Event]:
    with contextlib.suppress(EOFError, OSError):
        while worker.pipe.poll():
            event = cast(Event, worker.pipe.recv())
            if event.kind != "progress":
                worker.ended.add(event.label)
            yield event


def _work(chain: list[Task], device_name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    last = 0.0

    def should_stop() -> bool:
        return pipe.poll() or (parent is not None and not parent.is_alive())

    for task in chain:
        if should_stop():
            return

        def tell(progress: Progress, label: str = task.label) -> None:
            nonlocal last
            if time.monotonic() - last > REPORT_EVERY or progress.step == progress.steps:
                last = time.monotonic()
                with contextlib.suppress(OSError):  # the parent is gone: ``should_stop`` sees that next
                    pipe.send(Event(label, "progress", progress))

        event = _train(task, device_name, tell, should_stop)
        if event is None:
            return
        with contextlib.suppress(OSError):
            pipe.send(event)
        if event.kind != "finished":
            return


def _train(
    task: Task, device_name: str, tell: Callable[[Progress], None], should_stop: Callable[[], bool]
) -> Event | None:
    """Train one task in this process; return how it ended, or None if it was stopped."""
    try:
        train(
            task.run,
            task.folder,
            open_examples(task.run.data),
            pick(device_name),
            contexts=task.contexts,
            tuning=task.tuning,
            branch_from=task.branch_from,
            on_progress=tell,
            should_stop=should_stop,
        )
    except Interrupted:
        return None
    except DivergenceError as e:
        return Event(task.label, "diverged", message=str(e))
    except (TensorformerError, OSError) as e:
        return Event(task.label, "failed", message=f"{task.label}: {e}")
    except Exception as e:
        message = f"{task.label}: {type(e).__name__}: {' '.join(str(e).split())}"
        return Event(task.label, "failed", message=message, details=traceback.format_exc())
    return Event(task.label, "finished")


def _how_it_ended(process: BaseProcess, task: Task) -> str:
    code = process.exitcode or 0
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    hint = "; out of memory? lower --jobs" if code == -getattr(signal, "SIGKILL", 9) else ""
    return f"{task.folder}: its process {how}{hint}; the same command goes on from the last checkpoint"
