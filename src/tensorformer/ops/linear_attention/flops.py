"""FLOPs of linear attention from sizes alone: what a model counts before it has weights."""

from __future__ import annotations

import math

from tensorformer.ops.linear_attention.plan import TILE, Decayed, Update, auto_chunk, general_chunk, pieces


def flops(
    batch: int,
    time: int,
    heads: int,
    key_dims: tuple[int, ...],
    value_dim: int,
    chunk: int | None = None,
    *,
    decay: Decayed = "head",
    update: Update = "additive",
    initial_state: bool = False,
    final_state: bool = True,
) -> int:
    """Count the matrix-product FLOPs of one forward of `linear_attention`.

    2·m·n·k for each product, in the form that `auto` takes at these sizes unless `chunk` is given, and c³ for
    the inverse of a triangle of c steps. One decay a head is applied outside the products and changes no count;
    one a channel meets the scores in products half as wide, then a quarter, and so on.

    Args:
        batch, time, heads: sizes of v.
        key_dims: K_r of each branch, one or two.
        value_dim: V.
        chunk: steps a chunk, or None for what `auto` takes.
        decay: "none", "head" or "channel".
        update: "additive" or "delta".
        initial_state: whether a state is given.
        final_state: whether the state is asked for.

    Returns:
        FLOPs of the whole batch.
    """
    width = math.prod(key_dims)
    delta = update == "delta"
    if time == 1 and initial_state:
        return batch * heads * 2 * width * value_dim * (1 + delta)
    if delta or decay == "channel":
        chunk = chunk or general_chunk(time, key_dims, delta)
        cuts = pieces(time, chunk)
        total = sum(_general_chunk_flops(b - a, key_dims, value_dim, decay, delta) for a, b in cuts)
        met = time if initial_state else time - min(time, chunk)
        left = time if final_state else sum(b - a for a, b in cuts[:-1])
        return batch * heads * (total + 2 * width * value_dim * ((1 + delta) * met + left))
    chunk = chunk or auto_chunk(time, key_dims, value_dim, initial_state, final_state)
    total = 0
    for first, last in pieces(time, chunk):
        pairs = sum((stop - start) * stop for start, stop in pieces(last - first, TILE))
        met = initial_state or first > 0
        left = final_state or last < time
        total += 2 * pairs * (sum(key_dims) + value_dim)
        total += 2 * (last - first) * width * value_dim * (met + left)
    return batch * heads * total


def _general_chunk_flops(steps: int, key_dims: tuple[int, ...], value_dim: int, decay: Decayed, delta: bool) -> int:
    """Count what the steps of one chunk send one another, for one head."""
    rows = 1 + delta
    scores = 2 * steps * steps
    if decay == "channel":
        size = 1 << (steps - 1).bit_length()
        scores = size * (size - 1)  # Σ 2·h² over the size/2h cuts of every h = 1, 2, 4, ..., size/2
    solve = steps**3 + 2 * steps * steps * value_dim if delta else 0
    return rows * scores * sum(key_dims) + solve + 2 * steps * steps * value_dim
