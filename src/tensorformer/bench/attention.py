"""Linear attention on a CPU against `F.scaled_dot_product_attention` (8 heads of 64): training, memory and decoding.

Each figure that has a target says whether it is met. A point whose laws fail has no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.bench.attention_memory import extra_memory
from tensorformer.bench.attention_points import Point, violations
from tensorformer.bench.turns import keep_memory, medians

HEADS, HEAD_DIM = 8, 64  # of softmax attention
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BILINEAR = Point("bilinear", HEADS, (16, 16), HEAD_DIM)
OTHERS = (
    Point("ssd", 4, (128,), 128, "head"),
    Point("gla", 4, (128,), 128, "channel"),
    Point("deltanet", 4, (128,), 128, "none", "delta"),
    Point("gdn", 4, (128,), 128, "head", "delta"),
    Point("kda", 4, (128,), 128, "channel", "delta"),
)
FORWARD, BOTH = "forward", "forward+backward"
# How many times as fast as softmax attention, in float32.
TARGETS = {
    ("bilinear", BOTH, 256): 0.8,
    ("bilinear", BOTH, 1024): 1.6,
    ("bilinear", BOTH, 4096): 4.0,
    ("bilinear", FORWARD, 16384): 15.0,
    ("gdn", BOTH, 4096): 1.5,
    ("kda", BOTH, 4096): 1.5,
    ("bilinear", "decoding", 8192): 15.0,
}
RUN = 32  # tokens decoded one after another
FORWARD_MEGABYTES, FLAT = 80, 1.2  # at most: at the longest context, and the slowest token by the fastest


@dataclass(frozen=True)
class Sizes:
    """Steps at which something is measured.

    Args:
        trained: forward and backward. forward: forward alone, beyond those.
        others: forward and backward, of the points other than bilinear attention's.
        memory_forward: of the memory forward takes. memory: of that of forward and backward.
        contexts: that decoding goes on from.
    """

    trained: tuple[int, ...] = (256, 1024, 4096)
    forward: tuple[int, ...] = (16384,)
    others: tuple[int, ...] = (1024, 4096)
    memory_forward: int = 16384
    memory: tuple[int, ...] = (4096, 8192, 16384)
    contexts: tuple[int, ...] = (1024, 8192, 65536)


Timer = Callable[[Mapping[str, Callable[[], object]], int], Mapping[str, float]]
Memory = Callable[[Point, int, bool], int]


def run(
    rounds: int, sizes: Sizes | None = None, timer: Timer = medians, memory: Memory = extra_memory
) -> Iterator[str]:
    """Yield the lines of the comparison, all timed in turn.

    Args:
        rounds: turns timed of each.
        sizes: what is measured.
        timer: what times: calls by name, rounds → seconds by name.
        memory: what measures memory: point, steps, whether backward is run → bytes.
    """
    sizes = sizes or Sizes()
    keep_memory()
    yield f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    yield f"× is the time of softmax attention ({HEADS} heads of {HEAD_DIM}) divided by ours"
    for name, dtype in DTYPES.items():
        sound, lines = _sound((BILINEAR, *OTHERS), dtype)
        yield from (f"{name} {line}" for line in lines)
        yield from (f"{name} {line}" for line in _training(sound, dtype, rounds, sizes, timer))
        if BILINEAR in sound and dtype == torch.float32:
            yield from (f"{name} {line}" for line in _memory(sizes, memory))
            yield from (f"{name} {line}" for line in _decoding(rounds, sizes, timer))


def _sound(points: Sequence[Point], dtype: torch.dtype) -> tuple[list[Point], list[str]]:
    """Return the points that hold their laws, and a line for each that does not."""
    broken = {point: list(violations(point, dtype)) for point in points}
    lines = [f"{point}: no result: {laws[0]}" for point, laws in broken.items() if laws]
    return [point for point, laws in broken.items() if not laws], lines


def _training(points: Sequence[Point], dtype: torch.dtype, rounds: int, sizes: Sizes, timer: Timer) -> Iterator[str]:
    first, rest = [p for p in points if p == BILINEAR], [p for p in points if p != BILINEAR]
    for time in (*sizes.trained, *sizes.forward):
        for direction in (FORWARD, BOTH):
            if direction == FORWARD or time not in sizes.forward:
                yield from _compared(first, direction, time, dtype, rounds, timer)
    for time in sizes.others:
        yield from _compared(rest, BOTH, time, dtype, rounds, timer)


def _compared(
    points: Sequence[Point], direction: str, time: int, dtype: torch.dtype, rounds: int, timer: Timer
) -> Iterator[str]:
    """Time softmax attention and these points in turn; yield a line for each point."""
    if not points:
        return
    backward = direction == BOTH
    calls = {"softmax": _softmax(time, dtype, backward)}
    calls |= {point.name: _linear(point, time, dtype, backward) for point in points}
    seconds = timer(calls, rounds)
    softmax = seconds["softmax"]
    for point in points:
        target = TARGETS.get((point.name, direction, time)) if dtype == torch.float32 else None
        ours = seconds[point.name]
        yield (
            f"{point}, {direction}, {time:,} tokens: {ours * 1e3:.2f} ms, softmax {softmax * 1e3:.2f} ms,"
            f" {_at_least(softmax / ours, target)}"
        )


def _linear(point: Point, time: int, dtype: torch.dtype, backward: bool) -> Callable[[], object]:
    x = point.operands(time, dtype)
    if not backward:
        return torch.no_grad()(x.attend)
    dy = torch.randn_like(x.v)
    x.require_gradients()
    return lambda: x.gradients(dy)


def _softmax(time: int, dtype: torch.dtype, backward: bool) -> Callable[[], object]:
    q, k, v, dy = torch.randn(4, 1, HEADS, time, HEAD_DIM).to(dtype).unbind()
    if not backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    leaves = q, k, v = tuple(x.detach().requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), leaves, dy)


def _memory(sizes: Sizes, memory: Memory) -> Iterator[str]:
    forward = memory(BILINEAR, sizes.memory_forward, False) / 1e6
    peaks = [memory(BILINEAR, time, True) / 1e6 for time in sizes.memory]
    if not forward or not all(peaks):
        yield f"{BILINEAR}, memory beside the operands: not measured, this system keeps no mark of it"
        return
    yield (
        f"{BILINEAR}, forward, {sizes.memory_forward:,} tokens: {forward:.0f} MB beside the operands"
        f" (target: at most {FORWARD_MEGABYTES}; {'met' if forward <= FORWARD_MEGABYTES else 'missed'})"
    )
    listed = " · ".join(
        f"{time:,} tokens {peak:.0f} MB ({peak * 1e6 / time:,.0f} bytes a token)"
        for time, peak in zip(sizes.memory, peaks, strict=True)
    )
    yield f"{BILINEAR}, forward+backward, beside the operands: {listed}"


def _decoding(rounds: int, sizes: Sizes, timer: Timer) -> Iterator[str]:
    """Time `RUN` tokens more, one after another: ours from a state, softmax attention's from a cache with room.

    Ours are also timed by themselves: a cache larger than the processor's, read in turn with a state, evicts it.
    """
    ours = {f"linear {context}": _tokens_from_state(context) for context in sizes.contexts}
    both = ours | {f"softmax {context}": _tokens_from_cache(context) for context in sizes.contexts}
    seconds = {name: whole / RUN for name, whole in timer(both, rounds).items()}
    for context in sizes.contexts:
        mine, theirs = seconds[f"linear {context}"], seconds[f"softmax {context}"]
        target = TARGETS.get((BILINEAR.name, "decoding", context))
        yield (
            f"{BILINEAR}, a token of {RUN} more after {context:,}: {mine * 1e6:.1f} µs, softmax {theirs * 1e6:.1f} µs,"
            f" {_at_least(theirs / mine, target)}"
        )
    alone = timer(ours, rounds)
    shortest, longest = (alone[f"linear {context}"] for context in (sizes.contexts[0], sizes.contexts[-1]))
    yield (
        f"{BILINEAR}, a token after {sizes.contexts[-1]:,} takes {longest / shortest:.2f} times one after"
        f" {sizes.contexts[0]:,}, with no softmax cache in between (target: at most {FLAT};"
        f" {'met' if longest / shortest <= FLAT else 'missed'})"
    )


def _tokens_from_state(context: int) -> Callable[[], object]:
    with torch.no_grad():
        start = BILINEAR.operands(context, torch.float32).attend(final_state=True)[1]
    tokens = [BILINEAR.operands(1, torch.float32) for _ in range(RUN)]

    @torch.no_grad()
    def run() -> Tensor | None:
        state = start
        for token in tokens:
            state = token.attend(state, final_state=True)[1]
        return state

    return run


def _tokens_from_cache(context: int) -> Callable[[], object]:
    keys, values = torch.randn(2, 1, HEADS, context + RUN, HEAD_DIM).unbind()
    q, k, v = torch.randn(3, 1, HEADS, RUN, HEAD_DIM).unbind()

    def run() -> None:
        for i in range(RUN):
            own, held = slice(i, i + 1), slice(context + i + 1)
            keys[:, :, context + i : held.stop], values[:, :, context + i : held.stop] = k[:, :, own], v[:, :, own]
            F.scaled_dot_product_attention(q[:, :, own], keys[:, :, held], values[:, :, held])

    return run


def _at_least(ratio: float, target: float | None) -> str:
    """Say a ratio, and whether it is what was asked for."""
    if target is None:
        return f"{ratio:.2f}×"
    return f"{ratio:.2f}× (target: {target} or more; {'met' if ratio >= target else 'missed'})"
