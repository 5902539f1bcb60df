"""Timing of several implementations in turn, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping

import torch

LEAST_SECONDS = 2e-3  # a shorter call is repeated within a turn: below it the clock and the loop count


def medians(calls: Mapping[str, Callable[[], object]], rounds: int, warm_ups: int = 2) -> dict[str, float]:
    """Return the median seconds of each call; every round times all of them, in alternating order.

    Args:
        calls: by name; each does the same work on the CPU.
        rounds: turns timed of each.
        warm_ups: turns before that.
    """
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(warm_ups):
            call()
        once = _seconds(call, 1)
        repeats[name] = max(1, min(1000, round(LEAST_SECONDS / max(once, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            times[name].append(_seconds(calls[name], repeats[name]) / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def keep_memory() -> None:
    """Let the allocator keep large blocks: otherwise results over 32 MiB are mapped and cleared at every call."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of glibc's malloc.h
            libc.mallopt(option, 2**30)


def copy_rate(megabytes: int = 512, rounds: int = 9) -> float:
    """Return the bytes a second of a copy too large for any cache, read and written counted."""
    source = torch.zeros(megabytes * 2**18)
    target = torch.empty_like(source)
    seconds = medians({"copy": lambda: target.copy_(source)}, rounds)["copy"]
    return 2 * source.nbytes / seconds


def _seconds(call: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - began
