"""The contract of a gate on its two halves: what goes in and out, what is refused, and what runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, GateError, ShapeError, suggest
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.gate import fits
from tensorformer.gates.kernel import _transforming
from tensorformer.ops.act_and_mul import reference
from tensorformer.ops.act_and_mul.compiled import act_and_mul_in_graph
from tensorformer.ops.act_and_mul.function import ActAndMul, halves, load, required
from tensorformer.ops.act_and_mul.layout import LAYOUTS
from tensorformer.ops.act_and_mul.program import tensor_parameters

Operands = Tensor | tuple[Tensor, Tensor]
Activation = Gate | Scalar | str  # a scalar is refused, but it is what `activation` may return
IMPLS = ("auto", "reference", "fast", "native", "triton")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def act_and_mul(x: Operands, gate: Activation, *, layout: str | None = None, impl: str = "auto") -> Tensor:
    """Apply a gate to the two halves of a tensor, or to a pair: h = φ(g)·ψ(u).

    bfloat16 and float16 are computed in float32, and h and every gradient rounded once (``reference`` rounds each
    factor as well). At ±∞ the result is the formula's limit, at NaN NaN. Backward keeps the input and nothing else,
    and computes again; a second derivative is right too, through the formula. Nothing is ever written into an input.

    In a graph of ``torch.compile``, and under the transforms of ``torch.func``, "auto" and "fast" are the formula
    itself, which Inductor fuses. Autocast changes nothing, but lets the two of a pair have unlike dtypes, and
    promotes them.

    Args:
        x: (..., 2·d_ff), of any float dtype, size and strides; or the pair (g, u), each (..., d_ff).
        gate: a gate with its parameters bound, or the name of one without parameters. Parameters that are tensors
            broadcast to g and get gradients.
        layout: where the halves of one tensor are: "gate_up" (transformers, vLLM), "up_gate" (``F.glu``) or
            "interleaved" (gpt-oss: g first). It belongs to the checkpoint and is never guessed.
        impl: "auto", "reference" (the formula in plain torch), "fast" (torch operations in place, tile by tile),
            "native" (C++, compiled on first use) or "triton".

    Returns:
        h (..., d_ff), in the dtype of x.

    Raises:
        GateError: there is no such gate, it is a scalar, or a parameter is not bound.
        ShapeError: an odd last axis, a pair whose members differ, a parameter that does not broadcast, or a tensor
            that is not floating.
        ConfigError: no layout, an unknown one, or one for a pair; an unknown ``impl``, or one that can't run here.

    Source: Shazeer 2020 (arXiv 2002.05202); each gate names its own.
    """
    bound = _bound(gate)
    operands = _operands(x, layout)
    tensors = _tensors(bound, operands, layout)
    _check_impl(impl)
    if torch.compiler.is_compiling():
        if impl in ("native", "triton"):
            return act_and_mul_in_graph(operands, bound, layout, impl)
        return bound(*halves(operands, layout))
    if _transforming():
        if impl in ("native", "triton"):
            raise ConfigError(f'impl "{impl}" has no rules for torch.func: write impl="auto" or "reference"')
        return bound(*halves(operands, layout))
    name = _resolve(bound, operands[0], impl)
    if name == "reference":
        return reference.forward(bound, *halves(operands, layout))
    kernels = required(name, bound, operands[0]) if impl == name else load(name)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*operands, *tensors)):
        return ActAndMul.apply(kernels, bound, layout, *operands, *tensors)  # pyright: ignore[reportReturnType]
    return kernels.forward(bound, *halves(operands, layout))


def resolve(x: Operands, gate: Activation, *, layout: str | None = None, impl: str = "auto") -> str:
    """Return the implementation that ``act_and_mul`` would run on these arguments in eager mode, without running it.

    Raises:
        GateError, ShapeError, ConfigError: as ``act_and_mul`` does.
    """
    bound = _bound(gate)
    operands = _operands(x, layout)
    _tensors(bound, operands, layout)
    _check_impl(impl)
    name = _resolve(bound, operands[0], impl)
    if name != "reference":
        required(name, bound, operands[0])
    return name


def _resolve(gate: Gate, x: Tensor, impl: str) -> str:
    if impl != "auto":
        return impl
    # A subclass, or a mode that records operators, would not see what other kernels do.
    if type(x) not in (Tensor, torch.nn.Parameter) or _recording():
        return "fast"
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        from tensorformer.ops.act_and_mul import native

        return "native" if native.is_ready(gate, x.dtype) else "fast"
    if x.device.type == "cuda":
        from tensorformer.ops.act_and_mul import triton

        return "fast" if triton.why_not(gate, x.dtype, x.device) else "triton"
    return "fast"


# Private in torch; should it go, "auto" is "fast", which is always right.
_recording: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def _bound(gate: Activation) -> Gate:
    if isinstance(gate, str):
        gate = SCALARS[gate] if gate in SCALARS and gate not in GATES else GATES[gate]
    if isinstance(gate, Scalar):
        gates = [n for n, other in GATES.items() if other.gate.name == gate.name]
        hint = f"; gates with it: {', '.join(gates)}" if gates else ""
        raise GateError(f"{gate.name!r} is a scalar activation, of one tensor: write SCALARS[{gate.name!r}](x){hint}")
    if (gate.gate.needs or gate.value.needs) and len(gate.parameters) < len(gate.needs):
        return gate.bind()  # raises, and says what to write
    return gate


def _operands(x: Operands, layout: str | None) -> tuple[Tensor, ...]:
    """Check shapes and dtypes, never values: that would wait for the device and break a compiled graph."""
    if not isinstance(x, Tensor):
        return _pair(x, layout)
    if layout not in LAYOUTS:
        choices = ", ".join(f'"{name}"' for name in LAYOUTS)
        if layout is None:
            raise ConfigError(f"one tensor holds both projections: write layout=, one of {choices}, as its weights are")
        raise ConfigError(f"no layout {layout!r}{suggest(layout, LAYOUTS)}")
    _check_float("x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}: its last axis holds both projections, 2·d_ff, an even number")
    return (x,)


def _pair(x: tuple[Tensor, Tensor], layout: str | None) -> tuple[Tensor, Tensor]:
    if layout is not None:
        raise ConfigError(f"layout {layout!r} with a pair (g, u), which needs none: leave it out")
    g, u = x
    _check_float("g", g)
    _check_float("u", u)
    if g.shape != u.shape or g.device != u.device:
        raise ShapeError(
            f"g has shape {tuple(g.shape)} on {g.device} and u {tuple(u.shape)} on {u.device}: write two of one shape"
            " and device"
        )
    if g.dtype != u.dtype:
        if not torch.is_autocast_enabled(g.device.type):
            raise ShapeError(f"g is {g.dtype} and u {u.dtype}: write g.to(u.dtype), or the other way round")
        dtype = torch.promote_types(g.dtype, u.dtype)
        return g.to(dtype), u.to(dtype)
    return g, u


def _check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name} is {x.dtype}: write .float(), or another of float64, float32, bfloat16, float16")


def _check_impl(impl: str) -> None:
    if impl not in IMPLS:
        raise ConfigError(f"no impl {impl!r} of act_and_mul{suggest(impl, IMPLS)}")


def _tensors(gate: Gate, operands: tuple[Tensor, ...], layout: str | None) -> list[Tensor]:
    """Return the parameters that are tensors, having checked that they broadcast to g."""
    found = tensor_parameters(gate)
    if not found:
        return []
    g, _ = halves(operands, layout)
    for name, value in found.items():
        if not fits(value.shape, g.shape):
            raise ShapeError(f"{gate.name}: {name} of shape {tuple(value.shape)} does not fit {tuple(g.shape)}")
    return list(found.values())
