"""Optimisers and schedules by the names recipes use."""

from __future__ import annotations

import math

import torch
from torch import nn

from tensorformer.config.schema import AdamW, Cosine, Muon, Train, WarmupStableDecay


def make_optimizers(model: nn.Module, config: AdamW | Muon) -> list[torch.optim.Optimizer]:
    """Return the optimisers of a run; between them they hold every parameter once.

    AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) decays matrices, not norms and biases. Muon (Jordan et al.
    2024) takes the 2-D hidden matrices, its step scaled to AdamW's root mean square, so that one rate fits both;
    experts are stacked in tensors of three dimensions, which torch's Muon does not take.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if isinstance(config, AdamW):
        return [_adamw(named, config.lr, config.betas, config.eps, config.weight_decay)]
    hidden = [p for name, p in named if _is_hidden_matrix(name, p)]
    rest = [(name, p) for name, p in named if not _is_hidden_matrix(name, p)]
    muon = torch.optim.Muon(
        hidden,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, _adamw(rest, config.lr, config.adamw_betas, config.adamw_eps, config.weight_decay)]


def rate(step: int, train: Train) -> float:
    """Return the learning rate of step ``step`` (from 0) as a share of the peak."""
    steps, schedule = n_steps(train), train.schedule
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if isinstance(schedule, Cosine):
        done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * done))
    start = decay_start(train)
    if step < start:
        return 1.0
    return 1 - (1 - schedule.final) * (step - start) / (steps - start)


def n_steps(train: Train) -> int:
    """Return the optimiser steps of a run: whole batches only."""
    return train.tokens // (train.batch_size * train.context)


def decay_start(train: Train) -> int:
    """Return the step at which warm-up–stable–decay starts to decay.

    Up to there the run does not depend on its length, so longer runs branch off at that checkpoint.
    """
    assert isinstance(train.schedule, WarmupStableDecay)
    steps = n_steps(train)
    return max(train.schedule.warmup_steps, steps - max(1, round(steps * train.schedule.decay)))


def _is_hidden_matrix(name: str, p: nn.Parameter) -> bool:
    return p.ndim == 2 and name.startswith("layers.") and not _is_bias(name)


def _is_bias(name: str) -> bool:
    return name.endswith("bias")  # those of stacked experts have two dimensions


def _adamw(
    named: list[tuple[str, nn.Parameter]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    decayed = [p for name, p in named if p.ndim >= 2 and not _is_bias(name)]
    others = [p for name, p in named if p.ndim < 2 or _is_bias(name)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)
