"""The contract of a gate on its two halves: what goes in and out, what is refused, and what runs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, suggest
from tensorformer.gates import Gate
from tensorformer.gates.kernel import PLAIN, recording, transforming
from tensorformer.ops.act_and_mul import reference
from tensorformer.ops.act_and_mul.compiled import act_and_mul_in_graph
from tensorformer.ops.act_and_mul.function import ActAndMul, gate_and_up, load, required
from tensorformer.ops.autocast import autocast_dtype
from tensorformer.ops.operands import Activation, Operand, bound, check, check_parameters

IMPLS = ("auto", "reference", "fast", "native", "triton")


def act_and_mul(x: Operand, gate: Activation, *, layout: str | None = None, impl: str = "auto") -> Tensor:
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
    ready, operands, parameters = _checked(x, gate, layout, impl)
    if torch.compiler.is_compiling() or transforming():
        if impl not in ("native", "triton"):
            return ready(*gate_and_up(operands, layout))
        if torch.compiler.is_compiling():
            return act_and_mul_in_graph(operands, ready, layout, impl)
        raise ConfigError(f'impl "{impl}" is not for torch.func or forward-mode differentiation: write impl="auto"')
    name = _resolve(ready, operands, parameters, impl)
    if name == "reference":
        return reference.forward(ready, *gate_and_up(operands, layout))
    kernels = required(name, ready, operands[0]) if impl == name else load(name)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*operands, *parameters)):
        return ActAndMul.apply(kernels, ready, layout, *operands, *parameters)  # pyright: ignore[reportReturnType]
    return kernels.forward(ready, *gate_and_up(operands, layout))


def resolve(x: Operand, gate: Activation, *, layout: str | None = None, impl: str = "auto") -> str:
    """Return the implementation that ``act_and_mul`` would run on these arguments in eager mode, without running it.

    Raises:
        GateError, ShapeError, ConfigError: as ``act_and_mul`` does.
    """
    ready, operands, parameters = _checked(x, gate, layout, impl)
    name = _resolve(ready, operands, parameters, impl)
    if name != "reference":
        required(name, ready, operands[0])
    return name


def _checked(
    x: Operand, gate: Activation, layout: str | None, impl: str
) -> tuple[Gate, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the gate ready to use, the one operand or the two, and the parameters that are tensors, or refuse them."""
    ready = bound(gate)
    operands = (x,) if isinstance(x, Tensor) else _promoted(x)
    shape = check(x if isinstance(x, Tensor) else operands, layout)  # pyright: ignore[reportArgumentType]
    parameters = tuple(check_parameters(ready, shape, operands[0].device).values())
    if impl not in IMPLS:
        raise ConfigError(f"no impl {impl!r} of act_and_mul{suggest(str(impl), IMPLS)}")
    return ready, operands, parameters


def _promoted(pair: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the members of a pair in one dtype where autocast is on; otherwise they have to have one."""
    if not all(isinstance(x, Tensor) for x in pair) or len({x.dtype for x in pair}) == 1:
        return pair  # `split` refuses what is no tensor
    if autocast_dtype(pair[0].device) is None:
        return pair
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in pair))
    return tuple(x.to(dtype) for x in pair)


def _resolve(gate: Gate, operands: tuple[Tensor, ...], parameters: tuple[Tensor, ...], impl: str) -> str:
    x = operands[0]
    # A subclass, or what records operators, would not see what other kernels do.
    seen = recording() or any(type(t) not in PLAIN for t in (*operands, *parameters))
    if impl in ("native", "triton") and seen:
        raise ConfigError(f'impl "{impl}" is invisible to tensor subclasses, modes and tracers: write impl="auto"')
    if impl != "auto":
        return impl
    if seen:
        return "fast"
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        from tensorformer.ops.act_and_mul import native

        return "native" if native.is_ready(gate, x.dtype) else "fast"
    if x.device.type == "cuda":
        from tensorformer.ops.act_and_mul import triton

        return "fast" if triton.why_not(gate, x.dtype, x.device) else "triton"
    return "fast"
