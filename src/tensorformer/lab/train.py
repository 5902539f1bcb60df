"""One training run, from its first weights to its final losses; read it top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from tensorformer.config.schema import MoE, Run, Train, WarmupStableDecay
from tensorformer.data.batches import Windows
from tensorformer.data.examples import Examples, held_out, training_batches
from tensorformer.data.prepare import Corpus
from tensorformer.data.probe_tasks import UNSCORED
from tensorformer.data.split import Part
from tensorformer.errors import CheckpointError, DivergenceError
from tensorformer.lab import checkpoint, evaluate, record
from tensorformer.lab.device import autocast, compiled
from tensorformer.lab.experts import expert_statistics
from tensorformer.lab.optim import decay_start, make_optimizers, n_steps, rate
from tensorformer.lab.results import ExpertLayer
from tensorformer.nn.balancing import router_loss
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.router import Routing, update_biases

CHECKPOINTS_KEPT = 2  # the last one, and the one before it in case the last is damaged


class Progress(NamedTuple):
    """Where a run stands."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float


class Interrupted(Exception):
    """The run was asked to stop; it has written a checkpoint and goes on from there next time."""


def train(
    run: Run,
    folder: Path,
    examples: Examples,
    device: torch.device,
    *,
    contexts: tuple[int, ...] = (1,),
    tuning: bool = False,
    branch_from: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> record.Result:
    """Train a run to its end, from wherever its folder says it stands, and measure it.

    A killed run continues with the same call and ends with the same bits.

    Args:
        run: what to train.
        folder: the run's own; another configuration's is refused.
        examples: prepared text, or a probe.
        device: where to compute.
        contexts: the final loss is measured at these multiples of the training context.
        tuning: measure the final loss on the tuning part too.
        branch_from: folder of a shorter run of the same schedule, whose checkpoint before the decay is taken over.
        on_progress: called after every step.
        should_stop: asked after every step.

    Returns:
        The final losses, read from the folder if the run had finished before.

    Raises:
        DivergenceError: a loss or gradient was not finite.
        Interrupted: ``should_stop`` said so.
    """
    record.claim(folder, run, examples.fingerprint)
    with record.locked(folder):
        lengths = [run.train.context * c for c in contexts]
        if before := record.finished(folder, lengths, tuning):
            return before
        seconds, forward = _train(run, folder, examples, device, branch_from, on_progress, should_stop)
        result = _measure(run, forward, examples, lengths, tuning, seconds)
        if not all(map(math.isfinite, (result.loss, *result.context_losses.values()))):
            raise DivergenceError(f"{folder}: its final loss is {result.loss}; lower train.optimizer.lr")
        record.write_result(folder, result)
    return result


def _train(
    run: Run,
    folder: Path,
    examples: Examples,
    device: torch.device,
    branch_from: Path | None,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> tuple[float, nn.Module]:
    """Take the steps that are missing; return the seconds of all, and the model."""
    config, steps = run.train, n_steps(run.train)

    model = TensorTransformer(run.model, run.seed).to(device)
    optimizers = make_optimizers(model, config.optimizer)
    batch = training_batches(examples, config.context, config.batch_size, run.seed)
    start, seconds = _resume(run, folder, branch_from, model, optimizers)
    if isinstance(examples, Corpus):
        examples.tokenizer.save(folder)  # so that the run can speak for itself
    forward, mixtures = compiled(model, config, device), [m.config for m in model.mixtures()]

    keep = {decay_start(config)} if isinstance(config.schedule, WarmupStableDecay) else set()
    log, clock = record.Log(folder / record.METRICS, start), record.Log(folder / record.TIMING, start)
    try:
        for step in range(start, steps):
            began = time.perf_counter()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = config.optimizer.lr * rate(step, config)
            inputs, targets = batch(step)
            try:
                taken = training_step(forward, optimizers, inputs.to(device), targets.to(device), config, mixtures)
            except NotFinite as e:
                record.mark_diverged(folder)
                raise _explain(e, model, inputs.to(device), config, folder, step) from None
            elapsed = time.perf_counter() - began
            seconds += elapsed

            done = step + 1
            tokens = done * config.batch_size * config.context
            row: dict[str, float] = {"loss": taken.loss, "lr": config.optimizer.lr * rate(step, config)}
            if mixtures:
                row["router_loss"] = taken.router_loss
            log(step=done, tokens=tokens, **row, grad_norm=taken.grad_norm)
            if done % config.evaluate_every == 0 or done == steps:
                log(step=done, tokens=tokens, **_evaluate(run, model, forward, examples))
                clock(step=done, seconds=seconds)
            stop = done < steps and should_stop()
            if done % config.checkpoint_every == 0 or done == steps or done in keep or stop:
                checkpoint.save(folder, done, seconds, model, optimizers)
                checkpoint.prune(folder, keep, newest=1 if done == steps else CHECKPOINTS_KEPT)
            on_progress(Progress(done, steps, taken.loss, config.batch_size * config.context / elapsed))
            if stop:
                raise Interrupted
    finally:
        log.close()
        clock.close()

    return seconds, forward


def _evaluate(
    run: Run, model: TensorTransformer, forward: nn.Module, examples: Examples
) -> dict[str, float | list[ExpertLayer]]:
    """Return what is recorded between steps: loss, accuracy on a probe, and what experts did with the first batch."""
    config = run.train

    def windows() -> Iterator[Windows]:
        return held_out(examples, "validation", config.context, config.evaluate_tokens)

    found = evaluate.score(forward, windows(), config.precision)
    row: dict[str, float | list[ExpertLayer]] = {"validation_loss": found.loss}
    if run.data.probe is not None:
        row["validation_accuracy"] = found.accuracy
    if model.mixtures():
        inputs, _ = next(windows())
        row["experts"] = expert_statistics(model, inputs.to(next(model.parameters()).device), config.precision)
    return row


class NotFinite(Exception):
    """A loss or a gradient is NaN or infinite; nothing was updated."""

    def __init__(self, what: str, value: float) -> None:
        super().__init__(what)
        self.what, self.value = what, value


class Taken(NamedTuple):
    """An optimiser step."""

    loss: float  # mean, nats per scored target
    grad_norm: float  # before clipping
    router_loss: float  # what balancing the experts added to the loss


def training_step(
    forward: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    inputs: Int[Tensor, "b t"],
    targets: Int[Tensor, "b t"],
    config: Train,
    mixtures: Sequence[MoE] = (),
) -> Taken:
    """Take one optimiser step on a batch, in as many forward passes as the config says.

    Args:
        forward: tokens (b, t) to logits; with mixtures of experts a ``TensorTransformer``, or compiled from one.
        optimizers: of its parameters.
        inputs, targets: the batch.
        config: the ``[train]`` table.
        mixtures: tables of the model's mixtures of experts, in order: their losses are added, each micro-batch by
            itself, and the biases that balance them without a loss are moved once, after the optimiser.

    Raises:
        NotFinite: before anything is updated.
    """
    micro = config.micro_batch_size or len(inputs)
    total, routers = torch.zeros(2, device=inputs.device)
    scored = (targets != UNSCORED).sum()
    for x, y in zip(inputs.split(micro), targets.split(micro), strict=True):
        routings: list[Routing] = []
        with autocast(inputs.device, config.precision):
            logits = forward(x, None, routings) if mixtures else forward(x)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=UNSCORED, reduction="sum")
        loss = losses / scored
        total += loss.detach()
        if mixtures:
            balance = router_loss(list(zip(mixtures, routings, strict=True)), len(x)) * (len(x) / len(inputs))
            routers += balance.detach()
            loss = loss + balance
        loss.backward()
    value = total.item()
    if not torch.isfinite(total + routers):
        raise NotFinite("loss", value + routers.item())
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not torch.isfinite(norm):
        raise NotFinite("gradient", norm.item())
    if config.grad_clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if mixtures:
        update_biases(forward)
    return Taken(value, norm.item(), routers.item())


def _resume(
    run: Run, folder: Path, branch_from: Path | None, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Return the step to start from and the seconds trained so far, the model and optimisers filled to match."""
    last = checkpoint.latest(folder)
    if last is None and branch_from is not None:
        trunk = record.read_run(branch_from)
        same = msgspec.structs.replace(trunk, train=msgspec.structs.replace(trunk.train, tokens=run.train.tokens))
        if same != run or decay_start(trunk.train) > decay_start(run.train):
            raise CheckpointError(f"{branch_from}: is no trunk of {folder}; they differ in more than their length")
        last = checkpoint.at(branch_from, decay_start(trunk.train))
        if last is not None:
            for name in (record.METRICS, record.TIMING):
                record.Log(folder / name, decay_start(trunk.train), rows_before=branch_from / name).close()
    if last is None:
        return 0, 0.0
    meta = checkpoint.load(last, model, optimizers)
    return meta.step, meta.seconds


def _measure(
    run: Run, forward: nn.Module, examples: Examples, lengths: list[int], tuning: bool, seconds: float
) -> record.Result:
    config = run.train

    def score(part: Part, context: int, span: int) -> evaluate.Score:
        windows = held_out(examples, part, context, config.final_tokens, span=span)
        return evaluate.score(forward, windows, config.precision)

    found = {n: score("validation", n, max(lengths)) for n in lengths}
    final = found[config.context]
    return record.Result(
        loss=final.loss,
        bits_per_byte=evaluate.bits_per_byte(final.loss, examples.validation) if isinstance(examples, Corpus) else None,
        tuning_loss=score("tuning", config.context, config.context).loss if tuning else None,
        context_losses={n: s.loss for n, s in found.items()},
        seconds=seconds,
        context_accuracies={n: s.accuracy for n, s in found.items()} if run.data.probe is not None else {},
    )


def _explain(
    error: NotFinite, model: nn.Module, inputs: Tensor, config: Train, folder: Path, step: int
) -> DivergenceError:
    """Name the step, the layer and the last good checkpoint."""
    if error.what == "gradient":
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        # A backward pass goes from the last layer to the first and spoils all it meets from there on.
        where = f"first in the gradient of {bad[-1]}" if bad else "in the gradient's norm"
    else:
        where = f"first in the output of {_first_non_finite(model, inputs, config)}"
    last = checkpoint.latest(folder)
    mend = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return DivergenceError(
        f"{folder}: step {step + 1}: the {error.what} is {error.value}, {where}; {mend}; "
        f"lower train.optimizer.lr or lengthen the warm-up"
    )


def _first_non_finite(model: nn.Module, inputs: Tensor, config: Train) -> str:
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if any(isinstance(t, Tensor) and not t.isfinite().all() for t in parts):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name]
    with torch.no_grad(), autocast(inputs.device, config.precision):
        model(inputs)
    for handle in handles:
        handle.remove()
    return found[0] if found else "the loss itself"
