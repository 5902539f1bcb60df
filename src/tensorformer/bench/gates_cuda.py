"""Gates on a GPU: first that they are right there, then how near a copy they come, then what a gate costs in a GEMM.

The claim this measures: exponentials and divisions after a matrix product stall its pipeline. So one kernel runs
both products with three epilogues, bilinear (neither), SwiGLU (one of each a number) and SiTU (three and five), at
the sizes of fine-grained experts; beside them the product alone, and torch with the gate as a pass of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.bench.cuda_clock import cuda_seconds
from tensorformer.bench.gates import EAGER
from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.ops.act_and_mul import act_and_mul, triton
from tensorformer.ops.act_and_mul.check import violations
from tensorformer.ops.gated_linear import gated_linear, reference
from tensorformer.ops.gated_linear import triton as linear_triton

# In units in the last place of float32: Triton takes `ex2.approx` and `div.full`, which may each be off by two, of an
# exponent that was rounded before. A wrong factor is caught from 8e-6 on.
_UNITS, _EPS = 64, torch.finfo(torch.float32).eps

Timer = Callable[[Mapping[str, Callable[[], object]], int, torch.device], Mapping[str, float]]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Args:
        checked: the gates whose laws are checked. timed: those of them that are timed alone.
        epilogues: those that are timed in the fused kernel, the cheapest first.
        dtypes: of what is checked and of the gate alone. linear_dtype: of the fused kernel (checked in float32 too).
        rows: (tokens, d_ff) of the gate alone.
        experts: (d_model, d_ff) of the fused kernel: an expert's width, or its share on one of several devices.
        tokens: that one expert gets.
    """

    checked: tuple[str, ...] = tuple(sorted(GATES))
    timed: tuple[str, ...] = ("bilinear", "swiglu", "geglu", "situ")
    epilogues: tuple[str, ...] = ("bilinear", "swiglu", "situ")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    linear_dtype: torch.dtype = torch.bfloat16
    rows: tuple[tuple[int, int], ...] = ((4096, 2816), (16, 2816), (4096, 2731))
    experts: tuple[tuple[int, int], ...] = (
        *((4096, 256), (4096, 512), (4096, 2048)),
        *((7168, 384), (7168, 768), (7168, 3072)),
    )
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096)


def chosen(names: Sequence[str]) -> Sizes:
    """Return what is measured of these gates; of all where none is named.

    Raises:
        GateError: there is no such gate.
    """
    if not names:
        return Sizes()
    known = tuple(GATES[name].name for name in names)
    return Sizes(checked=known, timed=known, epilogues=known)


def run(device: torch.device, rounds: int, sizes: Sizes | None = None, timer: Timer = cuda_seconds) -> Iterator[str]:
    """Check, then time, gates on ``device``; yield the lines of the result.

    A gate whose laws fail is named, with the law, and has no other line.

    Args:
        rounds: how often each thing is timed; the median counts.
        timer: what times: works by name, rounds, device → seconds by name.

    Raises:
        ConfigError: the kernels can't run on ``device``.
    """
    sizes = sizes or Sizes()
    reason = triton.why_not(GATES["bilinear"], torch.float32, device)
    if reason is not None:
        raise ConfigError(f"the benchmark of gates on a GPU {reason}: --device cuda")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    yield f"{name}, torch {torch.__version__}"
    sound: set[str] = set()
    for gate in sizes.checked:
        broken = list(broken_laws(example(GATES[gate]), device, sizes))
        yield from (f"{gate}: no result: {law}" for law in broken)
        if not broken:
            sound.add(gate)
    yield f"laws hold for {len(sound)} of {len(sizes.checked)} gates"
    yield from _alone(device, rounds, sizes, timer, sound)
    yield from _fused(device, rounds, sizes, timer, sound)


def broken_laws(gate: Gate, device: torch.device, sizes: Sizes) -> Iterator[str]:
    """Yield each law that the kernels with ``gate`` in them break on ``device``."""
    for dtype in sizes.dtypes:
        broken = violations(triton.forward, triton.backward, gate, dtype, device, slack=_UNITS * _EPS)
        yield from (f"act_and_mul in {dtype}: {law}" for law in broken)
    if gate.name not in sizes.epilogues:
        return
    draws = torch.Generator().manual_seed(0)
    for tokens, d_model, d_ff in ((1, 7, 3), (65, 257, 63), (130, 192, 160)):
        x, a, b = (torch.randn(n, d_model, generator=draws) for n in (tokens, d_ff, d_ff))
        a, b = (w * 3 / d_model**0.5 for w in (a, b))
        for dtype in dict.fromkeys((torch.float32, sizes.linear_dtype)):
            yield from _linear_off(gate, *(t.to(device, dtype) for t in (x, a, b)))


def _linear_off(gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> Iterator[str]:
    """Yield what is wrong with the fused kernel at these operands; it may be off by twice as much as the plain one."""
    truth = reference.forward(gate, x.double(), a.double(), b.double())
    found, plain = linear_triton.forward(gate, x, a, b), reference.forward(gate, x, a, b)
    error, usual = (float((y.double() - truth).abs().max()) for y in (found, plain))
    largest = float(truth.abs().max())
    allowed = 2 * (usual + torch.finfo(x.dtype).eps * largest) + _UNITS * _EPS * largest
    if not error <= allowed:
        at = f"{x.shape[0]} tokens, d_model {x.shape[1]}, d_ff {a.shape[0]}"
        yield f"gated_linear in {x.dtype}, {at}: off by {error:.3g}, allowed {allowed:.3g}"


def _alone(device: torch.device, rounds: int, sizes: Sizes, timer: Timer, sound: set[str]) -> Iterator[str]:
    """Time the gate as a pass of its own; the floor is a copy of as many bytes, whose speed is printed first."""
    for dtype in sizes.dtypes:
        for tokens, d_ff in sizes.rows:
            x = torch.randn(tokens, 2 * d_ff, device=device).to(dtype)
            to, half = torch.empty_like(x), x.nbytes / 2
            copied = 2 * x.nbytes / timer({"copy": lambda x=x, to=to: to.copy_(x)}, rounds, device)["copy"]
            yield f"[{tokens}, 2·{d_ff}] {dtype}: a copy {copied / 1e9:,.0f} GB/s"
            for name in (n for n in sizes.timed if n in sound):
                works = _passes(name, x)
                for direction, moved in (("forward", 3 * half), ("forward+backward", 8 * half)):
                    seconds = timer(works[direction], rounds, device)
                    speeds = ", ".join(
                        f"{who} {moved / s / 1e9:,.0f} GB/s ({moved / s / copied:.0%} of the copy)"
                        for who, s in seconds.items()
                    )
                    yield f"  {name} {direction}: {speeds}"


def _passes(name: str, x: Tensor) -> Mapping[str, Mapping[str, Callable[[], object]]]:
    gate = example(GATES[name])
    plain = _written_in_torch(gate)
    torch.compiler.reset()  # or the eighth gate would be refused, being one more version of the same function

    def halves(x: Tensor) -> Tensor:
        return plain(*x.chunk(2, -1))

    kinds = {
        "triton": lambda x: act_and_mul(x, gate, layout="gate_up", impl="triton"),
        "eager": halves,
        "compiled": torch.compile(halves, dynamic=False),
    }

    def gradients(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(leaf), leaf, grad)

    leaf = x.detach().clone().requires_grad_()
    grad = torch.randn(x.shape[0], x.shape[1] // 2, device=x.device).to(x.dtype)
    return {
        "forward": {who: functools.partial(f, x) for who, f in kinds.items()},
        "forward+backward": {who: functools.partial(gradients, f) for who, f in kinds.items()},
    }


def _written_in_torch(gate: Gate) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what models have in its place, or the formula where nobody has written it out."""
    return functools.partial(EAGER[gate.name], **gate.parameters) if gate.name in EAGER else gate


def _fused(device: torch.device, rounds: int, sizes: Sizes, timer: Timer, sound: set[str]) -> Iterator[str]:
    """Time both products with each epilogue, the products alone, and torch: one product, then the gate by itself."""
    names = [n for n in sizes.epilogues if n in sound]
    gates = {n: example(GATES[n]) for n in names}
    for d_model, d_ff in sizes.experts:
        merged = (torch.randn(2 * d_ff, d_model, device=device) * 3 / d_model**0.5).to(sizes.linear_dtype)
        a, b = merged.chunk(2)
        for tokens in sizes.tokens:
            x = torch.randn(tokens, d_model, device=device).to(sizes.linear_dtype)
            at = f"d_model {d_model}, d_ff {d_ff}, {tokens} tokens"
            works: dict[str, Callable[[], object]] = {"products alone": functools.partial(F.linear, x, merged)}
            for name, gate in gates.items():
                wrong = list(_linear_off(gate, x, a, b))
                yield from (f"{name}: no result: {law}" for law in wrong)
                if not wrong:
                    works |= _epilogue(name, gate, x, merged)
            with torch.no_grad():
                seconds = timer(works, rounds, device)
            flops = 4 * tokens * d_model * d_ff
            listed = ", ".join(f"{who} {s * 1e6:.1f} µs" for who, s in seconds.items())
            fastest = min(seconds[n] for n in works if n.startswith("fused") or n == "products alone")
            yield f"{at}: {listed} (best {flops / fastest / 1e12:.0f} TFLOP/s)"
            floor = seconds.get(f"fused {sizes.epilogues[0]}")
            if floor:
                ratios = [f"{n} {seconds[f'fused {n}'] / floor:.3f}" for n in names if f"fused {n}" in seconds]
                yield f"  fused, against {sizes.epilogues[0]}: {', '.join(ratios)}"


def _epilogue(name: str, gate: Gate, x: Tensor, merged: Tensor) -> dict[str, Callable[[], object]]:
    a, b = merged.chunk(2)
    plain = _written_in_torch(gate)
    return {
        f"fused {name}": lambda: gated_linear(x, a, b, gate, impl="triton"),
        f"torch {name}": lambda: plain(*F.linear(x, merged).chunk(2, -1)),
        f"torch+triton {name}": lambda: act_and_mul(F.linear(x, merged), gate, layout="gate_up", impl="triton"),
    }
