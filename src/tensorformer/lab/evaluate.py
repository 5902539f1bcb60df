"""Losses on held-out text."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tensorformer.data.batches import evaluation_windows
from tensorformer.data.prepare import TokenPart
from tensorformer.lab.device import autocast


@torch.no_grad()
def loss(
    model: nn.Module, tokens: np.ndarray, context: int, limit: int, precision: str, span: int | None = None
) -> float:
    """Return the mean cross-entropy in nats per token over at most ``limit`` tokens, in windows of ``context``.

    Args:
        model: tokens (b, t) to logits.
        tokens: of one part of the corpus.
        context: window length in tokens.
        limit: tokens scored; the windows are spread over the whole part.
        precision: ``"float32"`` or ``"bf16"``.
        span: windows are cut from stretches of this many tokens, so that several contexts score the same text.
    """
    device = next(model.parameters()).device
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    for inputs, targets in evaluation_windows(tokens, context, limit, span=span):
        with autocast(device, precision):
            logits = model(inputs.to(device))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten(), reduction="sum")
        total, count = total + losses.item(), count + targets.numel()
    model.train(was_training)
    return total / count


def bits_per_byte(nats_per_token: float, part: TokenPart) -> float:
    """Return ``nats / (bytes a token · ln 2)``, which tokenizers do not change the meaning of."""
    return nats_per_token / part.bytes_per_token / math.log(2)
