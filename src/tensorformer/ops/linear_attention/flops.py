"""FLOPs of linear attention from sizes alone: what a model counts before it has weights."""

from __future__ import annotations

import math

from tensorformer.ops.linear_attention.plan import TILE, auto_chunk, pieces


def flops(
    batch: int,
    time: int,
    heads: int,
    key_dims: tuple[int, ...],
    value_dim: int,
    chunk: int | None = None,
    *,
    initial_state: bool = False,
    final_state: bool = True,
) -> int:
    """Count the matrix-product FLOPs of one forward of `linear_attention`.

    2·m·n·k for each product, in the form that `auto` takes at these sizes unless `chunk` is given. A decay is
    applied outside the products and changes no count.

    Args:
        batch, time, heads: sizes of v.
        key_dims: K_r of each branch, one or two.
        value_dim: V.
        chunk: steps a chunk, or None for what `auto` takes.
        initial_state: whether a state is given.
        final_state: whether the state is asked for.

    Returns:
        FLOPs of the whole batch.
    """
    width = math.prod(key_dims)
    if time == 1 and initial_state:
        return batch * heads * 2 * width * value_dim
    chunk = chunk or auto_chunk(time, key_dims, value_dim, initial_state, final_state)
    total = 0
    for first, last in pieces(time, chunk):
        pairs = sum((stop - start) * stop for start, stop in pieces(last - first, TILE))
        met = initial_state or first > 0
        left = final_state or last < time
        total += 2 * pairs * (sum(key_dims) + value_dim)
        total += 2 * (last - first) * width * value_dim * (met + left)
    return batch * heads * total
