"""The contract of the fused activation and cast: what goes in and out, what is refused, and what runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest
from tensorformer.gates import Gate
from tensorformer.gates.kernel import recording, transforming
from tensorformer.ops.act_quant import fast, reference, triton
from tensorformer.ops.act_quant.formats import Format, known
from tensorformer.ops.act_quant.quantised import Quantised, tensor_scale_of
from tensorformer.ops.operands import FLOATS, Activation, Operand, bound, check_parameters, split

_IMPLS = {"reference": reference.forward, "fast": fast.forward, "triton": triton.forward}


def act_quant(
    x: Operand,
    gate: Activation,
    *,
    format: str,
    group: int | None = None,
    layout: str | None = None,
    weight: Tensor | None = None,
    tensor_scale: float | Tensor | None = None,
    impl: str = "auto",
) -> Quantised:
    """Return h = φ(g)·ψ(u)·weight cast to a narrow format, without h itself ever being written out.

    code = round(h / scale) with ties to even, scale from the largest magnitude of its group; h is float32 until
    then. See :func:`quantise` for the formats, and for zeros, ±∞ and NaN. An operator for inference: whatever its
    inputs, it computes without autograd and its outputs require no gradient.

    "fast" is the reference in tiles, and the same to the bit, as far as torch's exp is: in the tail of its vector
    loops it can differ by one unit in the last place. "triton" is one kernel, with an exp of its own and the same
    cast. Under `torch.compile` "auto", "reference" and "fast" are traced as one formula; torch 2.13's Inductor has no
    float8_e8m0fnu on a CPU, so there mxfp8 needs another backend, such as "aot_eager".

    Args:
        x: (..., 2·d_ff) with a layout, or a pair (g, u) of (..., d_ff) without one; any strides, any float dtype.
        gate: a gate with its parameters bound, or the name of one that has none.
        format: a key of ``FORMATS``.
        group: how many neighbours share a scale: None for the whole token; mxfp8 and nvfp4 have their own.
        layout: "gate_up", "up_gate" or "interleaved".
        weight: (...) or (..., 1), one number a token (the router's), multiplied in before the cast.
        tensor_scale: nvfp4 only, see :func:`quantise`.
        impl: "auto", "reference", "fast" or "triton"; auto is fast on a CPU, and triton on a GPU where it can run.

    Returns:
        Codes and scales; ``codes, scale = act_quant(...)``.

    Raises:
        ConfigError: the format, group, layout or impl is unknown or does not fit, or the impl can't run here.
        GateError: the gate is unknown, is a function of one variable, or lacks a parameter.
        ShapeError: shapes or dtypes do not fit together.
    """
    g, u = split(x, layout)
    spec, size, ready, w = _checked(g, gate, format, group, weight)
    whole = tensor_scale_of(spec, tensor_scale)
    chosen = _chosen(ready, g, impl)
    if torch.compiler.is_compiling():
        chosen = "reference"  # the formula itself: Inductor fuses it, and needs no tiles
    with torch.no_grad():
        return Quantised(*_IMPLS[chosen](ready, g, u, w, spec, size, whole))


def resolve(
    x: Operand,
    gate: Activation,
    *,
    format: str,
    group: int | None = None,
    layout: str | None = None,
    weight: Tensor | None = None,
    tensor_scale: float | Tensor | None = None,
    impl: str = "auto",
) -> str:
    """Return the ``impl`` that :func:`act_quant` would run for these arguments, without running it.

    Raises:
        ConfigError, GateError, ShapeError: as :func:`act_quant` does.
    """
    g, _ = split(x, layout)
    spec, _, ready, _ = _checked(g, gate, format, group, weight)
    tensor_scale_of(spec, tensor_scale)
    return _chosen(ready, g, impl)


def _checked(
    g: Tensor, gate: Activation, format: str, group: int | None, weight: Tensor | None
) -> tuple[Format, int, Gate, Tensor | None]:
    """Check shapes and dtypes, never values: that would wait for the device and break a compiled graph."""
    spec = known(format)
    size = spec.group_of(g.shape[-1], group)
    ready = bound(gate)
    check_parameters(ready, g.shape, g.device)
    if weight is None:
        return spec, size, ready, None
    if weight.dtype not in FLOATS:
        raise ShapeError(f"weight is {weight.dtype}: write one floating number a token")
    if weight.device != g.device:
        raise ShapeError(f"weight is on {weight.device} and x on {g.device}: move one of them")
    leading = g.shape[:-1]
    if weight.shape not in (leading, (*leading, 1)):
        raise ShapeError(f"weight has shape {tuple(weight.shape)}: write one number a token, {tuple(leading)}")
    return spec, size, ready, weight.unsqueeze(-1) if weight.dim() == len(leading) else weight


def _chosen(gate: Gate, g: Tensor, impl: str) -> str:
    if impl not in ("auto", *_IMPLS):
        raise ConfigError(f"no impl {impl!r} of act_quant{suggest(impl, ('auto', *_IMPLS))}")
    if impl == "triton" or (impl == "auto" and g.device.type == "cuda" and not recording()):
        reason = _why_not_triton(gate, g)
        if reason is None:
            return "triton"
        if impl == "triton":
            raise ConfigError(f'impl "triton" of act_quant {reason}')
    if impl != "auto":
        return impl
    return "fast" if g.device.type == "cpu" else "reference"


def _why_not_triton(gate: Gate, g: Tensor) -> str | None:
    if torch.compiler.is_compiling() or transforming():
        return 'is not for torch.compile or torch.func: write impl="auto"'
    if type(g) not in (Tensor, torch.nn.Parameter):  # a fake tensor, say: a kernel sees memory alone
        return f'takes plain tensors, not {type(g).__name__}: write impl="auto"'
    return triton.why_not(gate, g.dtype, g.device)
