"""Continuous batching: rows join and leave a running batch, and each gets the tokens it would get alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.lab.feeding import PIECE, advance, check_prompt, device_of, prefill
from tensorformer.lab.sampling import Sampler, sample
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.state import State, compact, join, select


class Got(NamedTuple):
    """What a row got of a step.

    Attributes:
        handle: the row's, as ``add`` gave it.
        token: the next one; None where there is none, because the row ended before it.
        ended: why the row has left the batch (its number of tokens, a stop token, logits of which no token can be
            drawn); None: it is still in it.
    """

    handle: int
    token: int | None
    ended: Literal["length", "stop", "not finite"] | None = None


@dataclass
class _Row:
    handle: int
    prompt: list[int]
    left: int  # tokens it may still get
    stop: frozenset[int]
    sampler: Sampler
    token: int = -1  # its last one, which the model has not seen yet


class ContinuousBatch:
    """Prompts that are gone on from together, a token each a step.

    A new row's prompt is fed in the next step, together with those of other new rows, and its state is joined to
    those of the running rows; a row that leaves takes its own along. With linear layers a row costs the same
    whatever the lengths of the others; a softmax cache is as wide as that of the longest row.

    Args:
        model: the one.
        vocab_size: the tokenizer's; a model may have room for more.
        piece: tokens of a prompt that are fed at once.
    """

    def __init__(self, model: TensorTransformer, vocab_size: int, *, piece: int = PIECE) -> None:
        if piece < 1:
            raise ConfigError(f"piece {piece}: write 1 or more")
        self._model, self._vocab_size, self._piece = model, vocab_size, piece
        self._waiting: list[_Row] = []
        self._running: list[_Row] = []  # in the order of the state's rows
        self._state: State | None = None
        self._next_handle = 0

    @property
    def handles(self) -> list[int]:
        """The rows that get a token in the next step, in the order they were added."""
        return [row.handle for row in (*self._running, *self._waiting)]

    def add(
        self,
        prompt: Sequence[int],
        n_tokens: int,
        *,
        temperature: float,
        top_p: float,
        seed: int,
        stop: Collection[int] = (),
    ) -> int:
        """Let a row join in the next step, and return its handle.

        Args:
            prompt: tokens to go on from, at least one.
            n_tokens: most tokens it gets.
            temperature: divides the logits; 0 takes the likeliest token.
            top_p: only the likeliest tokens that together have this probability are drawn.
            seed: of its draws.
            stop: tokens of which each ends the row; it is not given out.

        Raises:
            ConfigError: an argument is out of its range.
        """
        check_prompt(self._model, prompt, "the prompt")
        if n_tokens < 1:
            raise ConfigError(f"{n_tokens} tokens: write 1 or more")
        sampler = Sampler.seeded(temperature, top_p, seed)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._waiting.append(_Row(handle, list(prompt), n_tokens, frozenset(stop), sampler))
        return handle

    def remove(self, handle: int) -> None:
        """Let a row leave.

        Raises:
            ConfigError: there is no such row, or not any more.
        """
        if handle not in self.handles:
            there = ", ".join(map(str, self.handles)) or "none"
            raise ConfigError(f"row {handle} is not in the batch; there are: {there}")
        self._waiting = [row for row in self._waiting if row.handle != handle]
        self._keep([i for i, row in enumerate(self._running) if row.handle != handle])

    def step(self) -> list[Got]:
        """Return what each row got, in the order they were added; those that ended have left.

        A step that fails changes nothing.
        """
        rows = [*self._running, *self._waiting]
        if not rows:
            return []
        logits, state = self._advanced()
        logits = logits[:, : self._vocab_size]
        finite = torch.isfinite(logits.amax(-1))
        tokens = iter(sample(logits[finite], [row.sampler for row, ok in zip(rows, finite, strict=True) if ok]))
        got = [
            _given(row, next(tokens)) if ok else Got(row.handle, None, "not finite")
            for row, ok in zip(rows, finite, strict=True)
        ]
        self._running, self._waiting, self._state = rows, [], state
        self._keep([i for i, g in enumerate(got) if g.ended is None])
        return got

    def _advanced(self) -> tuple[Float[Tensor, "b vocab"], State]:
        """Return the logits of the running rows and then of the waiting ones, and the state of all."""
        parts: list[tuple[Tensor, State]] = []
        if self._state is not None:
            last = torch.tensor([[row.token] for row in self._running], device=device_of(self._model))
            parts.append(advance(self._model, last, None, self._state, None))
        if self._waiting:
            parts.append(prefill(self._model, [row.prompt for row in self._waiting], self._piece))
        if len(parts) == 1:
            return parts[0]
        (logits, state), (new_logits, new_state) = parts
        return torch.cat((logits, new_logits)), join(state, new_state)

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self._running):
            return
        self._running = [self._running[i] for i in rows]
        if self._state is None or not rows:
            self._state = None
            return
        index = torch.tensor(rows, device=device_of(self._model))
        self._state = compact(select(self._state, index))


def _given(row: _Row, token: int) -> Got:
    if token in row.stop:
        return Got(row.handle, None, "stop")
    row.token, row.left = token, row.left - 1
    return Got(row.handle, token, None if row.left else "length")
