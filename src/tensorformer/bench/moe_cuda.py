"""Experts on a GPU: first that the kernels are right there, then time against others, then what the activation costs.

The claim this measures: between the products of narrow experts an activation stalls their pipeline. So the kernels run
with three activations, bilinear (neither exponential nor division), SwiGLU (one of each a number) and SiTU (three and
five), and each launch is timed alone; beside them `F.grouped_mm` with the activation as passes of its own, a loop over
experts, and rows sorted by expert in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorformer.bench.cuda_clock import cuda_seconds
from tensorformer.bench.moe import LAW, Layer, Sizes, closed, layer
from tensorformer.bench.moe_cuda_stages import GROUPED, backward_stages, forward_stages, passes
from tensorformer.bench.moe_cuda_stages import peers as other_peers
from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.ops.grouped_experts import grouped_experts, triton
from tensorformer.ops.grouped_experts.activation import ready
from tensorformer.ops.grouped_experts.check import Operands

# Of float32, for the exponentials and divisions of a GPU, which are off by two units each.
_SLACK = 64 * torch.finfo(torch.float32).eps
NAMES = ("y", "dx", "d_gate_up", "d_down", "d_weights", "d_gate_up_bias", "d_down_bias")

Work = Callable[[], object]
Timer = Callable[[Mapping[str, Work], int, torch.device], Mapping[str, float]]


@dataclass(frozen=True)
class Scope:
    """What is measured.

    Args:
        gates: the activations, the cheapest first: the others are measured against it.
        dtype: of what is timed; laws are tried in float32 too.
        checked: layers that the laws are tried on, with biases.
        timed: layers that are timed, without.
    """

    gates: tuple[str, ...] = ("bilinear", "swiglu", "situ")
    dtype: torch.dtype = torch.bfloat16
    checked: tuple[Sizes, ...] = (Sizes(1, 33, 7, 9, 3), Sizes(257, 96, 72, 3, 2))
    timed: tuple[Sizes, ...] = (
        *(Sizes(8192, 2048, 32, 256, 16), Sizes(8192, 2048, 64, 256, 16), Sizes(8192, 2048, 128, 128, 8)),
        *(Sizes(8192, 2048, 256, 64, 8), Sizes(64, 2048, 128, 128, 8), Sizes(8192, 2048, 5632, 8, 2)),
    )


def run(device: torch.device, rounds: int, scope: Scope | None = None, timer: Timer = cuda_seconds) -> Iterator[str]:
    """Check, then time, the kernels of experts on ``device``; yield the lines of the result.

    An activation whose laws fail is named, with the law, and has no other line; so is what computes something else.

    Args:
        device: a GPU that the kernels run on.
        rounds: how often each thing is timed; the median counts.
        scope: what is measured.
        timer: what times: works by name, rounds, device → seconds by name.

    Raises:
        ConfigError: the kernels can't run on ``device``.
    """
    scope = scope or Scope()
    nothing = torch.empty(1, 1, 1, dtype=scope.dtype, device=device)
    reason = triton.why_not(
        Operands(nothing[0], nothing, nothing, nothing[0], None, None), ready("bilinear", "gate_up")
    )
    if reason is not None:
        raise ConfigError(f"the benchmark of experts on a GPU {reason}: --device cuda")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    yield f"{name}, torch {torch.__version__}; {scope.dtype}"
    sound = []
    for gate in (example(GATES[n]) for n in scope.gates):
        dtypes = dict.fromkeys((torch.float32, scope.dtype))
        broken = [law for dtype in dtypes for law in broken_laws(gate, dtype, device, scope.checked)]
        yield from (f"{gate.name}: no result: {law}" for law in broken)
        sound += [] if broken else [gate]
    yield f"laws hold for {len(sound)} of {len(scope.gates)} activations"
    yield "× is the time of another divided by that of the kernels; shares are of the sum of a line"
    for sizes in scope.timed if sound else ():
        made = layer(sizes, scope.dtype, str(device))
        yield ""
        yield f"{sizes}"
        for gate in sound:
            yield from _compared(made, sizes, gate, rounds, device, timer)
        with torch.no_grad():
            yield from _staged(made, sizes, sound, rounds, device, timer)


def broken_laws(gate: Gate, dtype: torch.dtype, device: torch.device, checked: tuple[Sizes, ...]) -> Iterator[str]:
    """Yield which results of the kernels are too far from the loop in float64: outputs and gradients.

    They may be off by twice as much as the loop in that dtype, with one rounding of the largest number.
    """
    for sizes in checked:
        made = layer(sizes, dtype, str(device))
        draws = torch.Generator().manual_seed(1)
        shapes = ((sizes.experts, 2 * sizes.d_ff), (sizes.experts, sizes.d))
        biases = (torch.randn(s, generator=draws).to(device, dtype) for s in shapes)
        x, gate_up, down, weights, *_ = made.operands
        made = made._replace(operands=Operands(x, gate_up, down, weights, *biases))
        found, plain = (results(made, gate, impl) for impl in ("triton", "reference"))
        wide = Operands(*(t if t is None else t.double() for t in made.operands))  # pyright: ignore[reportArgumentType]
        truth = results(made._replace(operands=wide, dy=made.dy.double()), gate, "reference")
        for name, a, b, exact in zip(NAMES, found, plain, truth, strict=True):
            error, usual = (float((t.double() - exact).abs().max()) for t in (a, b))
            largest = float(exact.abs().max())
            allowed = 2 * (usual + torch.finfo(dtype).eps * largest) + _SLACK * largest
            if not error <= allowed:
                yield f"{name} in {dtype}, {sizes}: off by {error:.3g}, allowed {allowed:.3g}"


def results(made: Layer, gate: Gate, impl: str) -> list[Tensor]:
    """Return y and the gradient of every operand that is there, in their order."""
    leaves = [t.detach().clone().requires_grad_() for t in made.operands.given()]
    x, gate_up, down, weights, *biases = leaves
    y = grouped_experts(x, gate_up, down, gate, made.indices, weights, *biases, layout="gate_up", impl=impl)
    return [y.detach(), *torch.autograd.grad(y, leaves, made.dy)]


def _compared(made: Layer, sizes: Sizes, gate: Gate, rounds: int, device: torch.device, timer: Timer) -> Iterator[str]:
    """Time the kernels and everybody else in turn, forward and with backward; yield a line for each."""
    x, gate_up, down, weights, *_ = made.operands
    leaves = (x, gate_up, down, weights)

    def ours(impl: str) -> Callable[[], Tensor]:
        return lambda: grouped_experts(x, gate_up, down, gate, made.indices, weights, impl=impl)

    calls = {"kernels": ours("triton")}
    expected = results(made, gate, "triton")
    for name, call in {"sorted in torch": ours("fast"), **other_peers(made, gate)}.items():
        if fault := _fault(call, leaves, made.dy, expected):
            yield f"  {gate.name}, {name}: no result: {fault}"
        else:
            calls[name] = call
    for way, factor in (("forward", 1), ("forward+backward", 3)):
        seconds = timer({n: closed(call, leaves, made.dy, factor == 3) for n, call in calls.items()}, rounds, device)
        mine = seconds["kernels"]
        others = [f"{n} {s * 1e3:.3f} ms ({s / mine:.2f}×)" for n, s in seconds.items() if n != "kernels"]
        rate = factor * sizes.flops / mine / 1e12
        yield f"  {gate.name}, {way}: {', '.join([f'kernels {mine * 1e3:.3f} ms ({rate:.3g} TFLOP/s)', *others])}"


def _fault(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], dy: Tensor, expected: list[Tensor]) -> str | None:
    """Say why an implementation can't run, or what of it is not what the kernels compute."""
    try:
        y = call()
        found = (y.detach(), *torch.autograd.grad(y, leaves, dy))
    except (RuntimeError, NotImplementedError) as error:
        return " ".join(str(error).split())
    for name, a, b in zip(NAMES, found, expected, strict=False):
        error = float((a - b).abs().max() / b.abs().max())
        if not error <= 2 * LAW[dy.dtype]:
            return f"{name} is {error:.1e} off"
    return None


def _staged(
    made: Layer, sizes: Sizes, gates: list[Gate], rounds: int, device: torch.device, timer: Timer
) -> Iterator[str]:
    """Time every launch by itself, and the activation as passes of its own; yield lines of stages, and the answer."""
    costs: dict[str, dict[str, float]] = {}
    for way, stages in (("forward", forward_stages(made, sizes, gates)), ("backward", backward_stages(made, gates))):
        seconds = timer({f"{who}: {n}": w for who, named in stages.items() for n, w in named.items()}, rounds, device)
        for gate in gates:
            own = {n: seconds[f"{who}: {n}"] for who in ("all", gate.name) for n in stages[who]}
            whole = sum(own.values())
            parts = [f"{n} {s * 1e3:.3f} ms ({s / whole:.0%})" for n, s in own.items()]
            yield f"  {gate.name}, {way}, launch by launch: {', '.join(parts)}"
            costs.setdefault(way, {})[gate.name] = sum(seconds[f"{gate.name}: {n}"] for n in stages[gate.name])
    floor = gates[0].name
    for way, of in costs.items():
        told = ", ".join(f"{n} {s / of[floor]:.3f}" for n, s in of.items())
        yield f"  {way}, products with the activation behind them, against {floor}: {told}"
    try:
        seconds = timer(passes(made, gates), rounds, device)
    except (RuntimeError, NotImplementedError) as error:
        yield f"  {GROUPED}: no result: {' '.join(str(error).split())}"
        return
    first = seconds[GROUPED]
    told = ", ".join(f"{n} {s / first:.3f}" for n, s in seconds.items() if n != GROUPED)
    yield f"  forward, the activation as passes of its own, against the first products by {GROUPED}: {told}"
