"""Which form runs, and in what pieces: decided from sizes alone, so that FLOPs can be counted from a config."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

TILE = 64  # rows whose Gram matrices are built at once
CHUNK = 128  # steps whose features are built at once, and a chunk where the chunked form pays
BLOCK = 64  # steps a chunk under the delta rule or a decay a channel, whose cost inside a chunk grows fastest
SPAN = 4  # blocks that are computed together: fewer and larger operations, small enough for a cache
WORKING_SET = 1 << 20  # bytes of Gram tiles a CPU thread makes at once, to find them in its cache again

Decayed = Literal["none", "head", "channel"]
Update = Literal["additive", "delta"]


class Plan(NamedTuple):
    """What a call of `linear_attention` runs: implementation, form, and steps a chunk."""

    impl: Literal["reference", "fast", "triton"]
    form: Literal["recurrent", "chunked", "quadratic"]
    chunk: int


def auto_chunk(time: int, key_dims: tuple[int, ...], value_dim: int, initial: bool, final: bool) -> int:
    """Return the cheaper chunk: all of `time` (the quadratic form) or `CHUNK`.

    A step of the quadratic form costs time·σ multiply-adds forward and backward in proportion, with
    σ = Σ K_r + V; a step of the chunked form reads and writes the state, 2·K·V, and its Gram matrices are
    small. They cross at time ≈ 4·K·V/σ. A state that is given or asked for is read or written either way.
    """
    spared = 4 - 2 * initial - 2 * final
    crossing = spared * math.prod(key_dims) * value_dim / (sum(key_dims) + value_dim)
    return max(1, time) if time <= max(CHUNK, crossing) else CHUNK


def general_chunk(time: int, key_dims: tuple[int, ...], delta: bool) -> int:
    """Return the steps a chunk under the delta rule or a decay a channel: `BLOCK`, or all of a shorter `time`.

    The delta rule solves for what the steps of a chunk write, and loses digits where they are many more than the
    features and little decays: at most twice as many then, as a power of two. So few features make cheap states.
    """
    longest = 1 << (2 * math.prod(key_dims)).bit_length() - 1 if delta else BLOCK
    return max(1, min(time, BLOCK, longest))


class Span(NamedTuple):
    """Neighbouring chunks of one length that are computed together, but for the state they carry."""

    start: int
    chunks: int
    chunk: int  # steps

    @property
    def stop(self) -> int:
        return self.start + self.chunks * self.chunk


def span_chunks(chunk: int) -> int:
    """Return the chunks of a whole span."""
    return max(1, SPAN * BLOCK // chunk)


def spans(time: int, chunk: int) -> list[Span]:
    """Cut 0..time into chunks, `span_chunks` of them to a span; a shorter last chunk is a span of its own."""
    whole = time // chunk
    cuts = [Span(first * chunk, last - first, chunk) for first, last in pieces(whole, span_chunks(chunk))]
    return [*cuts, Span(whole * chunk, 1, time % chunk)] if time % chunk else cuts


def form(time: int, chunk: int) -> Literal["recurrent", "chunked", "quadratic"]:
    """Name the form that `chunk` steps a chunk make of `time` steps."""
    if chunk == 1:
        return "recurrent"
    return "quadratic" if chunk >= time else "chunked"


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    """Cut 0..length into (start, stop) of `size` steps, the last one shorter."""
    return [(start, min(length, start + size)) for start in range(0, length, size)]
