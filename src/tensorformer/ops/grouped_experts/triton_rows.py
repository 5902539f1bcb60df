"""Rows sorted by expert on a GPU, and which of them, of which expert, each program takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts.check import check_indices

LEAST = 16  # rows of a tile: what a product takes at least


class Rows(NamedTuple):
    """N·k rows sorted by expert, in tiles that know their expert.

    ``order`` (rows,) is the place of each in indices.flatten(), ``token`` (rows,) its row of x. ``begins`` (E + 1,)
    says where each expert's rows begin, and last where they end. ``tiles`` (tiles, 3) holds expert, start and stop of
    each tile; an empty one has a start that is not before its stop. ``height`` is the most rows of a tile. All int64.
    """

    order: Tensor
    token: Tensor
    begins: Tensor
    tiles: Tensor
    height: int


def sort_rows(indices: Tensor, experts: int, most: int) -> Rows:
    """Sort the rows of ``indices`` (N, k) by expert, tokens in order within each.

    Args:
        indices: which experts each token goes to.
        experts: how many there are.
        most: rows of a tile, a power of two; there are fewer where an expert has fewer on average.

    Raises:
        ShapeError: an index names no expert.
    """
    flat = indices.flatten()
    found, order = torch.sort(flat, stable=True)
    begins = torch.searchsorted(found, torch.arange(experts + 1, dtype=flat.dtype, device=flat.device))
    mean = -(-len(flat) // experts)
    height = min(most, max(LEAST, 1 << (mean - 1).bit_length())) if mean else LEAST
    tiles = tile_table(begins, len(flat), height)
    # The only time that the host waits for the device; all that could be queued before is.
    if begins[::experts].tolist() != [0, len(flat)]:
        check_indices(indices, experts)
    token = order.div(max(1, indices.shape[1]), rounding_mode="floor")
    return Rows(order, token, begins, tiles, height)


def tile_table(begins: Tensor, rows: int, height: int) -> Tensor:
    """Return expert, start and stop (tiles, 3) of tiles of at most ``height`` rows, none of two experts.

    How many tiles there are is not read from the device: there are as many as could be, and the last may be empty.
    """
    counts = begins.diff()
    experts = len(counts)
    past = torch.cumsum((counts + (height - 1)).div(height, rounding_mode="floor"), 0)
    tile = torch.arange(min(rows, rows // height + experts), device=begins.device)
    expert = torch.searchsorted(past, tile, right=True).clamp(max=experts - 1)
    before = torch.nn.functional.pad(past, (1, -1))
    start = begins[expert] + (tile - before[expert]) * height
    stop = torch.minimum(start + height, begins[expert + 1])
    return torch.stack((expert, start, stop), 1)
