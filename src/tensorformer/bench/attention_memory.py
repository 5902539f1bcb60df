"""The memory that linear attention takes beside its operands, each time in a process of its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from tensorformer.bench.attention_points import Point
from tensorformer.lab.device import memory_in_use, peak_memory, reset_peak_memory
from tensorformer.lab.interrupt import interrupts_ignored

_WARM_UP = 256  # steps that load what is loaded once and for all


def extra_memory(point: Point, time: int, backward: bool) -> int:
    """Return the bytes at the peak over those of the operands; outputs and gradients count.

    On a CPU this needs Linux, whose kernel keeps the mark; elsewhere it is 0.

    Args:
        point: in float32.
        time: steps.
        backward: whether gradients are worked out too.
    """
    spawn = multiprocessing.get_context("spawn")
    with interrupts_ignored(), ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(_peak, point, time, backward, torch.get_num_threads()).result()


def _peak(point: Point, time: int, backward: bool, threads: int) -> int:
    torch.set_num_threads(threads)
    _call(point, _WARM_UP, backward)
    return _call(point, time, backward)


def _call(point: Point, time: int, backward: bool) -> int:
    device = torch.device("cpu")
    x = point.operands(time, torch.float32)
    dy = torch.randn_like(x.v)
    if backward:
        x.require_gradients()
    reset_peak_memory(device)
    before = memory_in_use(device)
    if backward:
        x.gradients(dy)
    else:
        with torch.no_grad():
            x.attend()
    return max(0, peak_memory(device) - before)
