"""The rows of each expert side by side: which token comes where, and where each expert's rows begin and end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts.check import check_indices

TILE = 1 << 21  # elements of the widest matrix of a tile, if it is of more than one expert


class Tile(NamedTuple):
    """Neighbouring experts that have rows, how many each of them has, and where these lie."""

    experts: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """Its rows among all of them."""
        return slice(self.start, self.stop)

    @property
    def is_one_row_each(self) -> bool:
        """Whether every expert in it has one row, as with one token."""
        return self.stop - self.start == len(self.experts)

    def expert_of_row(self, device: torch.device) -> Tensor:
        """Return the expert of each of its rows, (rows,) int64."""
        sizes = torch.tensor(self.sizes, device=device)
        return torch.tensor(self.experts, device=device).repeat_interleave(sizes)


class Groups(NamedTuple):
    """N·k rows sorted by expert: ``order`` is the place of each in indices.flatten(), ``token`` its row of x."""

    order: Tensor
    token: Tensor
    counts: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @property
    def most(self) -> int:
        """Rows of the largest tile."""
        return max((t.stop - t.start for t in self.tiles), default=0)

    def idle(self) -> Iterator[slice]:
        """Yield runs of experts without a row."""
        expert = 0
        for busy, run in itertools.groupby(self.counts, bool):
            length = len(tuple(run))
            if not busy:
                yield slice(expert, expert + length)
            expert += length


def group(indices: Tensor, experts: int, width: int) -> Groups:
    """Sort the rows of ``indices`` (N, k) by expert, tokens in order within each.

    Args:
        indices: which experts each token goes to.
        experts: how many there are.
        width: columns of the widest matrix that has a row for each of these.

    Raises:
        ShapeError: an index names no expert.
    """
    check_indices(indices, experts)
    flat = indices.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=experts).tolist()
    token = order.div(max(1, indices.shape[1]), rounding_mode="floor")
    return Groups(order, token, tuple(counts), tuple(_tiles(counts, TILE // max(1, width))))


def _tiles(counts: list[int], most: int) -> Iterator[Tile]:
    """Yield tiles of at most so many rows, unless one expert has more."""
    experts: list[int] = []
    start = stop = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        if experts and stop + count - start > most:
            yield Tile(tuple(experts), tuple(counts[e] for e in experts), start, stop)
            experts, start = [], stop
        experts.append(expert)
        stop += count
    if experts:
        yield Tile(tuple(experts), tuple(counts[e] for e in experts), start, stop)
