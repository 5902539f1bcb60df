"""Which form runs, and in what pieces: decided from sizes alone, so that FLOPs can be counted from a config."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

TILE = 128  # rows whose Gram matrices are built at once; also the chunk, where the chunked form pays
WORKING_SET = 1 << 20  # bytes of one Gram tile on a CPU: it should stay in the cache of the core that made it


class Plan(NamedTuple):
    """What a call of `linear_attention` runs: implementation, form, and steps a chunk."""

    impl: Literal["reference", "fast"]
    form: Literal["recurrent", "chunked", "quadratic"]
    chunk: int


def auto_chunk(time: int, key_dims: tuple[int, ...], value_dim: int, initial: bool, final: bool) -> int:
    """Return the cheaper chunk: all of `time` (the quadratic form) or `TILE`.

    A step of the quadratic form costs time·σ multiply-adds forward and backward in proportion, with
    σ = Σ K_r + V; a step of the chunked form reads and writes the state, 2·K·V, and its Gram matrices are
    small. They cross at time ≈ 4·K·V/σ. A state that is given or asked for is read or written either way.
    """
    spared = 4 - 2 * initial - 2 * final
    crossing = spared * math.prod(key_dims) * value_dim / (sum(key_dims) + value_dim)
    return max(1, time) if time <= max(TILE, crossing) else TILE


def form(time: int, chunk: int) -> Literal["recurrent", "chunked", "quadratic"]:
    """Name the form that `chunk` steps a chunk make of `time` steps."""
    if chunk == 1:
        return "recurrent"
    return "quadratic" if chunk >= time else "chunked"


def group_size(v: Tensor, chunk: int) -> int:
    """Return how many heads of v (N, T, V) to take at once: all on an accelerator, a cacheful on a CPU."""
    if v.device.type != "cpu":
        return max(1, v.shape[0])
    steps = min(v.shape[1], chunk)
    tile = max(1, min(steps, TILE) * steps * v.element_size())
    return min(max(1, v.shape[0]), max(torch.get_num_threads(), WORKING_SET // tile))


def tiles(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut start..stop into runs of at most `TILE` steps."""
    return [(s, min(stop, s + TILE)) for s in range(start, stop, TILE)]
