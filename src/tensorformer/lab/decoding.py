"""Decoding step by step, with a way back: rewinding, reordering, saving and loading."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError
from tensorformer.lab import saved_state
from tensorformer.lab.feeding import PIECE, advance, check_tokens, device_of, pieces
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.state import State, select


class _Feed(NamedTuple):
    """What was fed, and what there was before it; rows as they were then."""

    tokens: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"] | None
    state: State
    logits: Float[Tensor, "b vocab"] | None
    rows: Int[Tensor, " n"] | None = None  # which of them today's rows were; None: the same

    def reordered(self, rows: Int[Tensor, " n"]) -> _Feed:
        return self._replace(rows=rows if self.rows is None else self.rows[rows])

    def today(self) -> _Feed:
        """Return it for today's rows."""
        tokens, real, state, logits, rows = self
        if rows is None:
            return self
        real = None if real is None else real[rows]
        logits = None if logits is None else logits[rows]
        return _Feed(tokens[rows], real, select(state, rows), logits)


class Decoder:
    """A model, what it has read so far in each row, and the last few states on the way there.

    Since a state is a value, an older one is taken up again exactly: after ``rewind(n)`` everything is, bit for bit,
    as if the last n steps had never been fed.

    Args:
        model: the one.
        batch: rows.
        ring: the last feeds that can be rewound, a long one counting once for each piece; each keeps a state.
        piece: tokens that are fed to the model at once; longer ones are cut.

    Attributes:
        state: of the model after all that was fed.
        logits: of the next token of each row; None before the first feed.
    """

    state: State
    logits: Float[Tensor, "b vocab"] | None

    def __init__(self, model: TensorTransformer, batch: int = 1, *, ring: int = 8, piece: int = PIECE) -> None:
        for name, value, least in (("batch", batch, 1), ("ring", ring, 0), ("piece", piece, 1)):
            if value < least:
                raise ConfigError(f"{name} {value}: write {least} or more")
        self.model, self.batch, self._piece = model, batch, piece
        self._ring: deque[_Feed] = deque(maxlen=ring)
        self.state, self.logits = model.initial_state(batch), None

    @property
    def rewindable(self) -> int:
        """The steps that can be rewound now."""
        return sum(feed.tokens.shape[1] for feed in self._ring)

    def feed(self, tokens: Int[Tensor, "b t"], real: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b vocab"]:
        """Return the logits of the token after each row's last.

        Args:
            tokens: the next steps of each row, one or more.
            real: where tokens stand, the rest being padding; None: everywhere. A row without any stays as it is.

        Raises:
            ShapeError: there are other rows than this decoder's, or no step, or a dtype is wrong.
            ConfigError: there is a token that the model does not know.
        """
        if tokens.ndim != 2 or tokens.shape[0] != self.batch or not tokens.shape[1]:
            raise ShapeError(f"tokens are {list(tokens.shape)}; this decoder needs [{self.batch}, 1 or more]")
        if real is not None and real.shape != tokens.shape:
            raise ShapeError(f"real is {list(real.shape)} and tokens are {list(tokens.shape)}; they must be alike")
        check_tokens(self.model, tokens)
        if real is not None and real.dtype != torch.bool:
            raise ShapeError(f"real is {real.dtype}; write a mask of bool, True where tokens stand")
        # The ring keeps them, and the caller may write into its own.
        for part, mask in pieces(tokens.clone(), None if real is None else real.clone(), self._piece):
            feed = _Feed(part, mask, self.state, self.logits)
            self.logits, self.state = advance(self.model, part, mask, self.state, self.logits)
            self._ring.append(feed)
        assert self.logits is not None
        return self.logits

    def rewind(self, n: int) -> None:
        """Take back the last ``n`` steps of every row, padding counted.

        Raises:
            ConfigError: the ring does not reach as far.
        """
        if not 0 <= n <= self.rewindable:
            raise ConfigError(
                f"can't rewind {n} steps: the ring of {self._ring.maxlen} feeds holds the last {self.rewindable}; "
                f"rewind no further, or take a longer ring"
            )
        while n > 0:
            last = self._ring.pop().today()
            self.state, self.logits = last.state, last.logits
            kept = last.tokens.shape[1] - n
            if kept > 0:
                self.feed(last.tokens[:, :kept], None if last.real is None else last.real[:, :kept])
            n = -kept

    def reorder(self, rows: Sequence[int]) -> None:
        """Go on with these rows in this order, as a beam search does; one may be named twice, and others left out.

        Raises:
            ShapeError: there is no such row, or none is named.
        """
        if not rows or not all(0 <= row < self.batch for row in rows):
            raise ShapeError(f"rows {list(rows)}: name one or more of 0 to {self.batch - 1}")
        index = torch.tensor(list(rows), device=device_of(self.model))
        self.state, self.batch = select(self.state, index), len(rows)
        self.logits = None if self.logits is None else self.logits[index]
        self._ring = deque((feed.reordered(index) for feed in self._ring), self._ring.maxlen)

    def save(self, path: Path) -> None:
        """Write state and logits to a safetensors file, whole or not at all.

        Raises:
            StorageError: it can't be written.
        """
        saved_state.save(path, self.model, self.state, self.logits)

    @classmethod
    def load(cls, path: Path, model: TensorTransformer, *, ring: int = 8, piece: int = PIECE) -> Decoder:
        """Return a decoder that goes on from a saved state; it can be rewound back to there, not further.

        Raises:
            CheckpointError: the file is missing or damaged, or of another model.
        """
        state, logits = saved_state.load(path, model)
        decoder = cls(model, state[0].seen.shape[0], ring=ring, piece=piece)
        decoder.state, decoder.logits = state, logits
        return decoder
