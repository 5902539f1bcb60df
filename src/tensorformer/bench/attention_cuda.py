"""Linear attention on a GPU: first that the kernels are right there, then time and memory against softmax attention.

Beside the kernels runs the chunked form in torch, which every point of the operator falls back to, and
`F.scaled_dot_product_attention` with 8 heads of 64, causal. A point whose laws fail in a dtype has no figure in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.bench.attention_points import Operands, Point
from tensorformer.bench.cuda_clock import cuda_seconds
from tensorformer.errors import ConfigError
from tensorformer.ops.linear_attention import triton

HEADS, HEAD_DIM = 8, 64  # of softmax attention
POINTS = (
    Point("bilinear", HEADS, (16, 16), HEAD_DIM),
    Point("bilinear_decay", HEADS, (16, 16), HEAD_DIM, "head"),
    Point("linear", 4, (128,), 128),
    Point("ssd", 4, (128,), 128, "head"),
)
# Of float32, for the exponentials of a GPU, which are off by two units each. A wrong factor is larger by far.
_SLACK = 64 * torch.finfo(torch.float32).eps

Work = Callable[[], object]
Timer = Callable[[Mapping[str, Work], int, torch.device], Mapping[str, float]]
Memory = Callable[[Work, torch.device], int]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Args:
        points: of linear attention, additive and with one decay a head or none.
        dtypes: of the operands.
        checked: steps at which the laws are tried: off the chunk on both sides.
        timed: steps of one row.
    """

    points: tuple[Point, ...] = POINTS
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    checked: tuple[int, ...] = (1, 63, 257)
    timed: tuple[int, ...] = (1024, 4096, 16384, 65536)


def peak_bytes(work: Work, device: torch.device) -> int:
    """Return the most memory that a work holds at a time beside what it is given, its results included."""
    work()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def run(
    device: torch.device,
    rounds: int,
    sizes: Sizes | None = None,
    timer: Timer = cuda_seconds,
    memory: Memory = peak_bytes,
) -> Iterator[str]:
    """Check, then time, linear attention on ``device``; yield the lines of the result.

    Args:
        device: a GPU that the kernels run on.
        rounds: how often each thing is timed; the median counts.
        sizes: what is measured.
        timer: what times: works by name, rounds, device → seconds by name.
        memory: what measures memory: work, device → bytes.

    Raises:
        ConfigError: the kernels can't run on ``device``.
    """
    sizes = sizes or Sizes()
    for dtype in sizes.dtypes:
        reason = triton.why_not((torch.empty(0, 0, 0, 1),), dtype, device, None)
        if reason is not None:
            raise ConfigError(f"the benchmark of attention on a GPU {reason}: --device cuda")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    yield f"{name}, torch {torch.__version__}"
    yield f"× is the time of softmax attention ({HEADS} heads of {HEAD_DIM}) divided by that of the kernels"
    for dtype in sizes.dtypes:
        sound = []
        for point in sizes.points:
            broken = list(broken_laws(point, dtype, device, sizes.checked))
            yield from (f"{point} in {dtype}: no result: {law}" for law in broken)
            sound += [] if broken else [point]
        yield f"laws hold for {len(sound)} of {len(sizes.points)} points in {dtype}"
        for time in sizes.timed:
            yield from _compared(sound, time, dtype, device, rounds, timer, memory)


def broken_laws(point: Point, dtype: torch.dtype, device: torch.device, times: tuple[int, ...]) -> Iterator[str]:
    """Yield which results of the kernels are too far from the recurrence in float64: outputs, states, gradients.

    They may be off by twice as much as the recurrence in that dtype, with one rounding of the largest number.
    """
    for time in times:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(time)
            x = _on(point.operands(time, dtype), device)
            width = torch.Size(point.key_dims).numel()
            state, d_state = torch.randn(2, 1, point.heads, width, point.value_dim).to(device).unbind()
            dy = torch.randn(x.v.shape).to(device)
        found, plain = (_results(x, state, dy, d_state, impl) for impl in ("triton", "reference"))
        truth = _results(x.to(torch.float64), state.double(), dy.double(), d_state.double(), "reference")
        for name, exact in truth.items():
            error, usual = (float((y[name].double() - exact).abs().max()) for y in (found, plain))
            largest = float(exact.abs().max())
            allowed = 2 * (usual + torch.finfo(dtype).eps * largest) + _SLACK * largest
            if not error <= allowed:
                yield f"{name} at {time} steps: off by {error:.3g}, allowed {allowed:.3g}"


def _results(x: Operands, state: Tensor, dy: Tensor, d_state: Tensor, impl: str) -> dict[str, Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (*x.leaves(), state)]
    degree = len(x.q)
    q, k, v = tuple(leaves[:degree]), tuple(leaves[degree : 2 * degree]), leaves[2 * degree]
    given = Operands(q, k, v, tuple(leaves[2 * degree + 1 : -1]), None, x.update)
    y, s = given.attend(leaves[-1], final_state=True, impl=impl)
    assert s is not None
    grads = torch.autograd.grad([y, s], leaves, [dy.to(y.dtype), d_state.to(s.dtype)])
    return {"output": y.detach(), "final state": s.detach(), **{f"gradient {i}": grad for i, grad in enumerate(grads)}}


def _on(x: Operands, device: torch.device) -> Operands:
    q, k, decays = (tuple(t.to(device) for t in several) for several in (x.q, x.k, x.log_decay))
    return Operands(q, k, x.v.to(device), decays, None, x.update)


def _compared(
    points: list[Point],
    time: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    timer: Timer,
    memory: Memory,
) -> Iterator[str]:
    """Time every point and softmax attention in turn, and measure what each takes; yield a line for each point."""
    for direction, backward in (("forward", False), ("forward+backward", True)):
        works = {"softmax": _softmax(time, dtype, device, backward)} if points else {}
        for point in points:
            x = _on(point.operands(time, dtype), device)
            dy = torch.randn_like(x.v) if backward else None
            works |= {f"{impl} {point.name}": _linear(x, dy, impl) for impl in ("triton", "fast")}
        seconds = timer(works, rounds, device) if works else {}
        bytes_ = {name: memory(work, device) for name, work in works.items()}

        def cost(name: str, seconds: Mapping[str, float] = seconds, held: Mapping[str, int] = bytes_) -> str:
            return f"{seconds[name] * 1e3:.3f} ms and {held[name] / 1e6:,.1f} MB"

        for point in points:
            ours, torch_, softmax = f"triton {point.name}", f"fast {point.name}", "softmax"
            yield (
                f"{point} in {dtype}, {direction}, {time:,} tokens: {cost(ours)}, in torch {cost(torch_)},"
                f" softmax {cost(softmax)}, {seconds[softmax] / seconds[ours]:.2f}×"
            )


def _linear(x: Operands, dy: Tensor | None, impl: str) -> Work:
    if dy is None:
        return torch.no_grad()(lambda: x.attend(impl=impl))
    x.require_gradients()
    return lambda: torch.autograd.grad(x.attend(impl=impl)[0], x.leaves(), dy)


def _softmax(time: int, dtype: torch.dtype, device: torch.device, backward: bool) -> Work:
    q, k, v, dy = torch.randn(4, 1, HEADS, time, HEAD_DIM, device=device).to(dtype).unbind()
    if not backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    leaves = q, k, v = tuple(x.detach().requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), leaves, dy)
