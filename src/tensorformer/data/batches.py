"""Which tokens a step sees: a pure function of (seed, step), the same for every variant and after every restart."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int64, UInt
from torch import Tensor

from tensorformer.errors import DataError

EVALUATION_BATCH = 8192  # tokens of a forward pass, whatever the context
Windows = tuple[Int64[Tensor, "batch context"], Int64[Tensor, "batch context"]]


class Batches:
    """Training batches of windows drawn without replacement, epoch after epoch.

    In epoch e, window w covers the inputs ``tokens[o + w·C : o + (w+1)·C]`` and, one further, their targets. The
    offset ``o`` and the order of the windows are drawn from (seed, e), so the cuts move from epoch to epoch. A batch
    that meets the end of an epoch goes on in the next one.

    Args:
        tokens: the training part.
        context: C, tokens a window.
        batch_size: windows a step.
        seed: of the order; nothing else is random.

    Raises:
        DataError: the tokens do not fill one window and its last target.
    """

    def __init__(self, tokens: UInt[np.ndarray, " tokens"], context: int, batch_size: int, seed: int) -> None:
        _require(tokens, context, "the training part", "shorten train.context, or add text to data.source")
        self._tokens = tokens
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        fitting = (len(tokens) - 1) // context
        self.windows_per_epoch = max(1, fitting - 1)  # one fewer than fit: room for the offset
        self._epochs: dict[int, Int64[np.ndarray, " windows"]] = {}

    def batch(self, step: int) -> Windows:
        """Return the inputs and targets of one step.

        Args:
            step: counted from 0.

        Returns:
            Two (batch_size, context) int64 tensors of token ids; targets are the inputs moved on by one token.
        """
        if step < 0:
            raise ValueError(f"step {step}: steps are counted from 0")
        drawn = range(step * self._batch_size, (step + 1) * self._batch_size)
        starts = [int(self._starts(i // self.windows_per_epoch)[i % self.windows_per_epoch]) for i in drawn]
        return _gather(self._tokens, starts, self._context)

    def _starts(self, epoch: int) -> Int64[np.ndarray, " windows"]:
        """Return the first token of every window of an epoch in the order they are drawn."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a batch rarely meets more than two
                del self._epochs[next(iter(self._epochs))]
            # numpy keeps the raw bits of a bit generator the same for ever; what it makes of them may change.
            bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
            slack = len(self._tokens) - 1 - self.windows_per_epoch * self._context
            offset = int(bits.random_raw()) % (slack + 1)
            order = np.argsort(bits.random_raw(self.windows_per_epoch), kind="stable")
            self._epochs[epoch] = offset + order * self._context
        return self._epochs[epoch]


def evaluation_windows(
    tokens: UInt[np.ndarray, " tokens"],
    context: int,
    limit_tokens: int,
    span: int | None = None,
) -> Iterator[Windows]:
    """Yield the windows on which a loss is measured: always the same ones, spread over the whole part.

    K spans of ``span`` tokens, none overlapping another and the free space shared out evenly around them, are each cut
    into windows of ``context``:  K = min(limit_tokens, tokens − 1) // span, at least 1. For a given span the scored
    targets do not depend on the context, so losses at 1×, 2× and 4× a context are comparable when all use the span of
    the longest: only what precedes a target differs.

    Args:
        tokens: the validation or tuning part.
        context: tokens a window.
        limit_tokens: targets scored at most (but one span at least).
        span: tokens, a multiple of ``context``; None: ``context``.

    Yields:
        Inputs and targets, two (batch, context) int64 tensors of token ids.

    Raises:
        DataError: the tokens do not fill one span and its last target.
        ValueError: ``span`` is no multiple of ``context``.
    """
    span = context if span is None else span
    if span < 1 or span % context:
        raise ValueError(f"span {span} tokens: must be a multiple of the context, {context} tokens")
    _require(tokens, span, "the part to evaluate on", "shorten train.context or compare.contexts, or raise its share")
    return _evaluation_windows(tokens, context, limit_tokens, span)


def scored_tokens(tokens: UInt[np.ndarray, " tokens"], limit_tokens: int, span: int) -> int:
    """Return how many targets ``evaluation_windows`` scores: whole spans, at least one."""
    return max(1, min(limit_tokens, len(tokens) - 1) // span) * span


def _evaluation_windows(
    tokens: UInt[np.ndarray, " tokens"], context: int, limit_tokens: int, span: int
) -> Iterator[Windows]:
    count = scored_tokens(tokens, limit_tokens, span) // span
    free = len(tokens) - 1 - count * span
    starts = [
        k * span + (2 * k + 1) * free // (2 * count) + inner for k in range(count) for inner in range(0, span, context)
    ]
    batch_size = max(1, EVALUATION_BATCH // context)
    for first in range(0, len(starts), batch_size):
        yield _gather(tokens, starts[first : first + batch_size], context)


def _gather(tokens: UInt[np.ndarray, " tokens"], starts: list[int], context: int) -> Windows:
    windows = torch.from_numpy(np.stack([tokens[s : s + context + 1] for s in starts]).astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _require(tokens: UInt[np.ndarray, " tokens"], context: int, what: str, mend: str) -> None:
    if len(tokens) < context + 1:
        need = f"a context of {context:,} needs {context + 1:,}"
        raise DataError(f"{what} holds {len(tokens):,} tokens and {need}: {mend}")
