"""What decoding carries from token to token: a growing cache for softmax, a matrix of fixed size for the rest.

States are values: a call returns a new one, and the old one can be gone on from again. So a copy is a reference,
and to rewind is to take up an older state. Rows can be picked, reordered, repeated and joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tensorformer.errors import ShapeError

LEAST_COLUMNS = 64  # of a cache that grows


class Columns:
    """Storage that caches share as they grow, one the continuation of another: each has a longer part of it.

    Args:
        k, v, position: of the longest cache so far.
        capacity: columns there is to be room for.
    """

    def __init__(self, k: Tensor, v: Tensor, position: Tensor, capacity: int) -> None:
        self.used = k.shape[2]
        spare = capacity - self.used
        self.k, self.v = F.pad(k, (0, 0, 0, spare)), F.pad(v, (0, 0, 0, spare))
        self.position = F.pad(position, (0, spare), value=-1)

    def write(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Take further columns; there must be room."""
        start, self.used = self.used, self.used + k.shape[2]
        self.k[:, :, start : self.used] = k
        self.v[:, :, start : self.used] = v
        self.position[:, start : self.used] = position

    def cache(self) -> SoftmaxState:
        """Return all of it as a cache."""
        n = self.used
        return SoftmaxState(self.k[:, :, :n], self.v[:, :, :n], self.position[:, :n], self)


class SoftmaxState(NamedTuple):
    """Keys (turned to their positions) and values of the tokens so far, a column each."""

    k: Float[Tensor, "b h_kv n k"]
    v: Float[Tensor, "b h_kv n v"]
    position: Int[Tensor, "b n"]  # of each column in its row; −1: no token
    storage: Columns | None = None  # what k, v and position are views of, where there may be room behind them

    @classmethod
    def empty(cls, batch: int, n_heads: int, head_dim: int, like: Tensor) -> SoftmaxState:
        """Return the state before the first token."""
        nothing = like.new_empty(batch, n_heads, 0, head_dim)
        return cls(nothing, nothing, torch.empty(batch, 0, dtype=torch.int64, device=like.device))

    @property
    def seen(self) -> Int[Tensor, " b"]:
        """Tokens of each row so far."""
        if self.position.shape[1] == 0:
            return self.position.new_zeros(self.position.shape[0])
        return self.position.amax(1) + 1

    def append(
        self, k: Float[Tensor, "b h_kv t k"], v: Float[Tensor, "b h_kv t v"], position: Int[Tensor, "b t"]
    ) -> SoftmaxState:
        """Return the state after further columns; this one stays as it is.

        They are written behind this one's where nobody has written yet, so that a step costs what it adds.
        """
        new = (k.to(self.k.dtype), v.to(self.v.dtype), position)
        if torch.is_grad_enabled():  # autograd may have kept what would be written behind
            k, v = torch.cat((self.k, new[0]), 2), torch.cat((self.v, new[1]), 2)
            return SoftmaxState(k, v, torch.cat((self.position, position), 1))
        n, storage = self.k.shape[2], self.storage
        total = n + k.shape[2]
        if storage is None or storage.used != n or storage.k.shape[2] < total:
            storage = Columns(self.k, self.v, self.position, max(LEAST_COLUMNS, 2 * total))
        storage.write(*new)
        return storage.cache()

    def rows(self, index: Int[Tensor, " n"]) -> SoftmaxState:
        """Return the rows of ``index``, in that order."""
        return SoftmaxState(self.k[index], self.v[index], self.position[index])

    def kept(self, columns: Int[Tensor, "b n"]) -> SoftmaxState:
        """Return the columns that are named for each row, in that order."""
        index = columns[:, None, :, None]
        k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.k, self.v))
        return SoftmaxState(k, v, self.position.gather(1, columns))

    def latest(self, most: int | None = None) -> SoftmaxState:
        """Return the last ``most`` tokens of each row, side by side; None: all, without the columns nobody uses."""
        n = self.position.shape[1]
        used = int((self.position >= 0).sum(1).max()) if self.position.numel() else 0
        width = used if most is None else min(used, most)
        if width == n:
            return self
        return self.kept(self.position.argsort(dim=1, stable=True)[:, n - width :])

    def joined(self, other: SoftmaxState) -> SoftmaxState:
        """Return the rows of both, the shorter cache with empty columns in front."""
        n = max(self.k.shape[2], other.k.shape[2])

        def widened(s: SoftmaxState) -> SoftmaxState:
            spare = n - s.k.shape[2]
            k, v = F.pad(s.k, (0, 0, spare, 0)), F.pad(s.v, (0, 0, spare, 0))
            return SoftmaxState(k, v, F.pad(s.position, (spare, 0), value=-1))

        a, b = widened(self), widened(other)
        return SoftmaxState(torch.cat((a.k, b.k)), torch.cat((a.v, b.v)), torch.cat((a.position, b.position)))


class LinearState(NamedTuple):
    """The sum Σ decay · φ(k) vᵀ of each head, at least float32; the last inputs of a convolution; tokens seen."""

    memory: Float[Tensor, "b h features v"]
    convolution: Float[Tensor, "b before channels"] | None
    seen: Int[Tensor, " b"]

    def rows(self, index: Int[Tensor, " n"]) -> LinearState:
        """Return the rows of ``index``, in that order."""
        convolution = None if self.convolution is None else self.convolution[index]
        return LinearState(self.memory[index], convolution, self.seen[index])

    def joined(self, other: LinearState) -> LinearState:
        """Return the rows of both."""
        convolution = None
        if self.convolution is not None and other.convolution is not None:
            convolution = torch.cat((self.convolution, other.convolution))
        return LinearState(torch.cat((self.memory, other.memory)), convolution, torch.cat((self.seen, other.seen)))


MixerState = SoftmaxState | LinearState
AState = TypeVar("AState", bound=SoftmaxState | LinearState)
State = tuple[MixerState, ...]  # of a model: one a block


def select(state: State, rows: Int[Tensor, " n"]) -> State:
    """Return the rows of a state that ``rows`` names, in that order; a row may be named twice."""
    return tuple(s.rows(rows) for s in state)


def join(a: State, b: State) -> State:
    """Return the rows of ``a``, then those of ``b``, which are states of one model."""
    check_fit(b, a)
    return tuple(
        x.joined(y) if isinstance(x, LinearState) else x.joined(cast(SoftmaxState, y))  # pyright: ignore
        for x, y in zip(a, b, strict=True)
    )


def compact(state: State) -> State:
    """Return the state without cache columns that no row uses, as rows leave behind that were longer."""
    return tuple(s.latest() if isinstance(s, SoftmaxState) else s for s in state)


def tensors(state: State) -> dict[str, Tensor]:
    """Return all that a state consists of, by name, to be written to a file."""
    named: dict[str, Tensor] = {}
    for i, s in enumerate(state):
        for field in s._fields:
            value = getattr(s, field)
            if isinstance(value, Tensor):
                named[f"{i}.{field}"] = value.contiguous()
    return named


def from_tensors(named: Mapping[str, Tensor], like: State) -> State:
    """Return the state that ``tensors`` took apart.

    Args:
        named: what ``tensors`` gave.
        like: any state of the same model, as ``initial_state`` gives one.

    Raises:
        ShapeError: it is the state of another model.
    """
    built: list[MixerState] = []
    for i, s in enumerate(like):
        fields = [f for f in s._fields if isinstance(getattr(s, f), Tensor)]
        missing = [f for f in fields if f"{i}.{f}" not in named]
        if missing:
            raise ShapeError(f"the state has no {i}.{missing[0]}, which block {i} of this model needs: another model's")
        built.append(s._replace(**{f: named[f"{i}.{f}"] for f in fields}))
    known = set(tensors(like))
    if unknown := sorted(set(named) - known):
        raise ShapeError(f"the state has {unknown[0]}, which this model has no place for: another model's")
    state = tuple(built)
    check_fit(state, like)
    return state


def check_fit(state: State, like: State) -> None:
    """Raise ShapeError unless both are states of one model, whatever their rows and columns."""
    check_blocks(state, len(like))
    for i, (a, b) in enumerate(zip(state, like, strict=True)):
        fitting(a, b, f"block {i}")


def check_blocks(state: State, n_layers: int) -> None:
    """Raise ShapeError unless there is a state for each block."""
    if len(state) != n_layers:
        raise ShapeError(
            f"the state is of {len(state)} blocks and the model has {n_layers}: give it a state of its own"
        )


def fitting(state: MixerState, like: AState, where: str, rows: int | None = None) -> AState:
    """Return a mixer's state.

    Args:
        state: the state.
        like: any state of the same mixer, of whatever rows and columns.
        where: of which mixer, for the error.
        rows: of the input that it is for; None: any.

    Raises:
        ShapeError: it is the state of another mixer, or of other rows.
    """
    found, wanted = _sizes(state), _sizes(like)
    if found != wanted:
        raise ShapeError(
            f"{where}: the state is of {_words(found)}, this layer needs one of {_words(wanted)}; "
            f"start from its own initial_state"
        )
    if rows is not None and (held := state.seen.shape[0]) != rows:
        raise ShapeError(f"{where}: the state has {held} rows and the input {rows}; select(state, rows) picks some")
    return cast(AState, state)


def _sizes(s: MixerState) -> tuple[str, tuple[int, ...]]:
    if isinstance(s, SoftmaxState):
        return "softmax attention", (s.k.shape[1], s.k.shape[3], s.v.shape[3])
    channels = 0 if s.convolution is None else s.convolution.shape[1:].numel()
    return "linear attention", (*s.memory.shape[1:], channels)


def _words(sizes: tuple[str, tuple[int, ...]]) -> str:
    kind, numbers = sizes
    names = ("heads", "key", "value") if kind.startswith("softmax") else ("heads", "features", "values", "convolution")
    return f"{kind} ({', '.join(f'{n} {x}' for n, x in zip(names, numbers, strict=True))})"
