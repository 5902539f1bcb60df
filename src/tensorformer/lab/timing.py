"""Step times of several variants, taken in turn, so that what else the machine does falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from tensorformer.config.schema import Run
from tensorformer.data.batches import Windows
from tensorformer.data.examples import Examples, training_batches
from tensorformer.lab.device import compiled
from tensorformer.lab.optim import make_optimizers
from tensorformer.lab.train import training_step
from tensorformer.nn.model import TensorTransformer

WARM_UPS = 2


def step_seconds(
    runs: Mapping[str, Run],
    examples: Examples,
    device: torch.device,
    rounds: int,
    on_round: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, float]:
    """Return the median seconds of a training step of every run, one step of each a round.

    Args:
        runs: what to time, by name; nothing is saved.
        examples: where the batches come from.
        device: where to compute, with as many threads as torch is set to.
        rounds: steps timed of each, after two to warm up.
        on_round: told the rounds done and their number.
    """
    steppers = {}
    for name, run in runs.items():
        batch = training_batches(examples, run.train.context, run.train.batch_size, run.seed)
        steppers[name] = stepper(run, batch, device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(WARM_UPS + rounds):
        for name, take_step in steppers.items():
            _synchronise(device)
            began = time.perf_counter()
            take_step(round_)
            _synchronise(device)
            if round_ >= WARM_UPS:
                times[name].append(time.perf_counter() - began)
        on_round(round_ + 1, WARM_UPS + rounds)
    return {name: statistics.median(t) for name, t in times.items()}


def stepper(run: Run, batch: Callable[[int], Windows], device: torch.device) -> Callable[[int], object]:
    """Return a function that takes a training step on a fresh model.

    The rate is 0: a step costs the same, and a run that would diverge at its rate does not end the measurement.
    """
    model = TensorTransformer(run.model, run.seed).to(device)
    optimizers = make_optimizers(model, run.train.optimizer)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    forward, mixtures = compiled(model, run.train, device), [m.config for m in model.mixtures()]

    def take_step(step: int) -> object:
        inputs, targets = batch(step)
        return training_step(forward, optimizers, inputs.to(device), targets.to(device), run.train, mixtures)

    return take_step


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
