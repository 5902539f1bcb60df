"""Products of each expert's rows with its own matrix, into memory that is there already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts.groups import Tile


@final
class Scratch:
    """Memory for one tile at a time, by name: what the largest tile needs, written over by the next.

    Args:
        like: a tensor of the dtype and device.
        rows: of the largest tile.
    """

    def __init__(self, like: Tensor, rows: int) -> None:
        self._like, self._rows = like, rows
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str, tile: Tile, columns: int) -> Tensor:
        """Return an unwritten (rows of the tile, columns), contiguous."""
        if name not in self._made:
            self._made[name] = self._like.new_empty(self._rows, columns)
        return self._made[name][: tile.stop - tile.start]


def products(tile: Tile, rows: Tensor, weights: Tensor, out: Tensor, biases: Tensor | None = None) -> Tensor:
    """Write rows @ weights[e] (+ biases[e]) into ``out``, each expert's rows by its own, and return it."""
    if tile.is_one_row_each and rows.dtype in (torch.bfloat16, torch.float16):
        # Each product of one row costs some 20 µs in these, more than a copy of its matrix.
        experts = tile.expert_of_row(rows.device)
        torch.bmm(rows.unsqueeze(1), weights.index_select(0, experts), out=out.unsqueeze(1))
        return out if biases is None else out.add_(biases.index_select(0, experts))
    if biases is None:
        for e, a, into in each(tile, rows, out):
            torch.mm(a, weights.select(0, e), out=into)
    else:
        for e, a, into in each(tile, rows, out):
            torch.addmm(biases[e], a, weights.select(0, e), out=into)
    return out


def transposed_products(tile: Tile, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write leftᵀ @ right of each expert's rows into out[e]."""
    product = torch.mul if tile.is_one_row_each else torch.mm
    for e, a, b in each(tile, left, right):
        product(a.mT, b, out=out.select(0, e))


def each(tile: Tile, a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every expert of a tile with its rows of two tensors."""
    return zip(tile.experts, a.split(tile.sizes), b.split(tile.sizes), strict=True)
