"""Losses and accuracies on what was held out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tensorformer.data.batches import Windows
from tensorformer.data.prepare import TokenPart
from tensorformer.data.probe_tasks import UNSCORED
from tensorformer.lab.device import autocast


class Score(NamedTuple):
    """How well a model did, over all targets that are scored."""

    loss: float  # mean cross-entropy, nats per scored target
    accuracy: float  # share of them to which the model gave the highest logit


@torch.no_grad()
def score(model: nn.Module, windows: Iterable[Windows], precision: str) -> Score:
    """Return the mean cross-entropy and the accuracy over the targets that are not ``UNSCORED``.

    Args:
        model: tokens (b, t) to logits.
        windows: inputs and targets, as ``data.examples.held_out`` yields them.
        precision: ``"float32"`` or ``"bf16"``.
    """
    device = next(model.parameters()).device
    total, right, count = 0.0, 0, 0
    was_training = model.training
    model.eval()
    for inputs, targets in windows:
        targets = targets.to(device).flatten()
        with autocast(device, precision):
            logits = model(inputs.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits.float(), targets, ignore_index=UNSCORED, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        count += int((targets != UNSCORED).sum())
    model.train(was_training)
    return Score(total / count, right / count)


def bits_per_byte(nats_per_token: float, part: TokenPart) -> float:
    """Return ``nats / (bytes a token · ln 2)``, which tokenizers do not change the meaning of."""
    return nats_per_token / part.bytes_per_token / math.log(2)
