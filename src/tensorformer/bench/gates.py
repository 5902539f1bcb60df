"""act_and_mul on a CPU against torch eager and Inductor, and what φ costs in a whole feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorformer.bench.turns import copy_rate, keep_memory, medians
from tensorformer.config.schema import FeedForward as FeedForwardConfig
from tensorformer.errors import GateError
from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.nn.feedforward import FeedForward
from tensorformer.ops.act_and_mul import act_and_mul, fast, native
from tensorformer.ops.act_and_mul.check import violations

SHAPES = ((4096, 2 * 2816), (16, 2 * 2816), (257, 2 * 1367))
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
GATE_NAMES = (
    "bilinear",
    "reglu",
    "glu",
    "swiglu",
    "geglu_tanh",
    "geglu",
    "situ",
    "swiglu_clamped",
    "swiglu_oai",
    "swiglu_clamp_after",
)
D_MODEL, WIDTHS, TOKENS = 1024, (128, 512, 2816), (16, 256, 4096)


def _oai(g: Tensor, u: Tensor, alpha: float, limit: float) -> Tensor:
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (u + 1) * (g * torch.sigmoid(alpha * g))


# As they are written in models: eager torch, with its own fused functions where it has them.
EAGER: dict[str, Callable[..., Tensor]] = {
    "bilinear": lambda g, u: g * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "glu": lambda g, u: torch.sigmoid(g) * u,
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "situ": lambda g, u, beta, linear_beta: (
        beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    ),
    "swiglu_oai": _oai,
    "swiglu_clamped": lambda g, u, limit: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit),
    "swiglu_clamp_after": lambda g, u, limit: F.silu(g).clamp(max=limit) * u.clamp(-limit, limit),
}


def run(names: Sequence[str], rounds: int, inductor: bool) -> Iterator[str]:
    """Yield the lines of the comparison, one for each gate, dtype and shape; times are milliseconds.

    Args:
        names: gates; without any, those of ``GATE_NAMES``.
        rounds: turns timed of each implementation.
        inductor: whether to compile the eager formula as well, some ten seconds for each line.

    Raises:
        GateError: a gate is unknown, or has no formula here to be compared with.
    """
    chosen = [example(GATES[name]) for name in names or GATE_NAMES]
    for gate in chosen:
        if gate.name not in EAGER:
            raise GateError(f"{gate.name!r} has no formula in eager torch here; write one of {', '.join(EAGER)}")
    keep_memory()
    rate = copy_rate()
    yield f"{torch.get_num_threads()} threads, torch {torch.__version__}; a copy moves {rate / 1e9:.1f} GB/s"
    yield "milliseconds (GB/s as a share of a copy's); × is eager's time divided by ours"
    for gate in chosen:
        yield from _gate(gate, rounds, inductor, rate)
    yield ""
    yield from _share_of_feed_forward(rounds)


def _gate(gate: Gate, rounds: int, inductor: bool, rate: float) -> Iterator[str]:
    yield f"\n{gate}"
    for dtype_name, dtype in DTYPES.items():
        kernels, refused = _kernels(gate, dtype)
        yield from (f"  {dtype_name}: {line}" for line in refused)
        for shape in SHAPES:
            x = torch.randn(shape).to(dtype) * 2
            calls = _calls(gate, x, kernels, inductor)
            moved = x.nbytes * 1.5, x.nbytes * 4  # forward: x and h; with backward: x twice, h, dh, dx
            for label, bytes_moved, backward in (("forward", moved[0], False), ("forward+backward", moved[1], True)):
                timed = {n: _closed(call, x, backward) for n, call in calls.items()}
                seconds = medians(timed, rounds)
                parts = []
                for name, s in seconds.items():
                    text = f"{name} {s * 1e3:.3f} ({bytes_moved / s / rate:.0%})"
                    parts.append(text if name == "eager" else f"{text} {seconds['eager'] / s:.2f}×")
                yield f"  {dtype_name} {list(shape)} {label}: " + " · ".join(parts)
        yield f"  {dtype_name} kept for backward, bytes a byte of input: " + " · ".join(
            f"{n} {_saved(call, dtype):.2f}" for n, call in _calls(gate, torch.empty(0), kernels, False).items()
        )


def _kernels(gate: Gate, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Return which of our implementations hold the laws here, and a line for each that does not."""
    held, refused = [], []
    for name, module in (("fast", fast), ("native", native)):
        reason = module.why_not(gate, dtype, torch.device("cpu")) if module is native else None
        if reason is None and (broken := violations(module.forward, module.backward, gate, dtype)):
            reason = f"no result: {broken[0]}"
        (held.append(name) if reason is None else refused.append(f"{name}: {reason}"))
    return held, refused


def _calls(gate: Gate, x: Tensor, kernels: list[str], inductor: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    formula, parameters = EAGER[gate.name], {n: v for n, v in gate.parameters.items() if v is not None}

    def eager(x: Tensor) -> Tensor:
        g, u = x.chunk(2, -1)
        return formula(g, u, **parameters)

    calls: dict[str, Callable[[Tensor], Tensor]] = {"eager": eager}
    if inductor and x.numel():
        torch.compiler.reset()
        calls["inductor"] = torch.compile(eager, dynamic=False)
    for name in kernels:
        calls[name] = lambda x, impl=name: act_and_mul(x, gate, layout="gate_up", impl=impl)
    return calls


def _closed(call: Callable[[Tensor], Tensor], x: Tensor, backward: bool) -> Callable[[], Any]:
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return call(x)

        return forward
    leaf = x.detach().requires_grad_()
    dh = torch.randn_like(x[..., : x.shape[-1] // 2])
    return lambda: torch.autograd.grad(call(leaf), leaf, dh)


def _saved(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float:
    """Return the bytes kept for backward, a byte of input; storage that is shared counts once."""
    x = torch.randn(64, 128).to(dtype).requires_grad_()
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(x)
    return sum(kept.values()) / x.nbytes


def _share_of_feed_forward(rounds: int) -> Iterator[str]:
    """Yield what SiLU costs in a whole layer: the time of SwiGLU less that of the bilinear layer, of the former."""
    yield f"share of a SwiGLU feed-forward layer (d_model {D_MODEL}) that φ costs, forward / forward+backward"
    for name, dtype in DTYPES.items():
        for width in WIDTHS:
            layers = {g: FeedForward(FeedForwardConfig(gate=g, d_ff=width), D_MODEL) for g in ("swiglu", "bilinear")}
            shares = []
            for tokens in TOKENS:
                x = torch.randn(tokens, D_MODEL).to(dtype)
                both = []
                for backward in (False, True):
                    calls = {g: _layer(layer.to(dtype), x, backward) for g, layer in layers.items()}
                    seconds = medians(calls, rounds)
                    both.append(f"{1 - seconds['bilinear'] / seconds['swiglu']:+.1%}")
                shares.append(f"{tokens} tokens {' / '.join(both)}")
            yield f"  {name} d_ff {width}: " + " · ".join(shares)


def _layer(layer: nn.Module, x: Tensor, backward: bool) -> Callable[[], Any]:
    parameters = list(layer.parameters())

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return (lambda: torch.autograd.grad(layer(x).sum(), parameters)) if backward else forward
