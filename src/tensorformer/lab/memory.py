"""Peak memory of training, each run in a process of its own, where nothing else has been."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

import msgspec
import torch

from tensorformer.config.schema import Model, Run, SoftmaxAttention
from tensorformer.config.widths import widths, with_widths
from tensorformer.lab.device import memory_in_use, peak_memory, pick, reset_peak_memory
from tensorformer.lab.interrupt import interrupts_ignored
from tensorformer.lab.timing import stepper

STEPS = 2  # the second finds the optimiser's moments in place


def training_peaks(runs: Mapping[str, Run], device: str) -> dict[str, int]:
    """Return the bytes that training takes at its peak, for each run, over what its process held before.

    On a CPU this needs Linux, whose kernel keeps the mark; elsewhere it is 0.

    Args:
        runs: by name.
        device: by name, as ``device.pick`` takes it.
    """
    spawn = multiprocessing.get_context("spawn")
    peaks = {}
    for name, run in runs.items():
        with interrupts_ignored(), ProcessPoolExecutor(1, mp_context=spawn) as process:
            peaks[name] = process.submit(_peak, run, device).result()
    return peaks


def _peak(run: Run, device_name: str) -> int:
    torch.set_num_threads(1)
    device = pick(device_name)
    # What is loaded once and for all (torch's lazy parts, formulas) is not the model's.
    small = msgspec.structs.replace(run, model=_tiny(run.model))
    _train_on_noise(small, device, batch_size=1)
    reset_peak_memory(device)
    before = memory_in_use(device)
    _train_on_noise(run, device, run.train.batch_size)
    return max(0, peak_memory(device) - before)


def _train_on_noise(run: Run, device: torch.device, batch_size: int) -> None:
    tokens = torch.randint(run.model.vocab_size, (batch_size, run.train.context + 1))
    take_step = stepper(run, lambda _: (tokens[:, :-1], tokens[:, 1:]), device)
    for step in range(STEPS):
        take_step(step)


def _tiny(model: Model) -> Model:
    """Return a model of the same kinds of parts, as small as they go."""
    mixers = {
        name: msgspec.structs.replace(m, n_heads=1, head_dim=2, n_kv_heads=1)
        if isinstance(m, SoftmaxAttention)
        else msgspec.structs.replace(m, n_heads=1, head_dim=2, value_dim=2)
        for name, m in model.mixers.items()
    }
    model = with_widths(model, dict.fromkeys(widths(model), 2))
    return msgspec.structs.replace(model, d_model=2, mixers=mixers)
