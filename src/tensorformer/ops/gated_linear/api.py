"""The contract of the gated linear map: what goes in and out, what is refused, and what runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest
from tensorformer.gates import Gate
from tensorformer.ops.autocast import autocast_dtype
from tensorformer.ops.gated_linear import reference
from tensorformer.ops.operands import Activation, bound, check_float, check_parameters

IMPLS = ("auto", "reference", "triton")


def gated_linear(x: Tensor, w_gate: Tensor, w_up: Tensor, gate: Activation, *, impl: str = "auto") -> Tensor:
    """Return φ(x W_gᵀ)·ψ(x W_uᵀ): both projections of a gated feed-forward layer and its gate.

    `reference` is two `F.linear` and the gate: each product is rounded to the dtype, and each factor again. `triton`
    is one kernel: both products are summed in float32, the gate is computed from those sums, and the result is
    rounded once; it has no gradient. `auto` takes it on a CUDA device where it can run and no gradient is asked for.
    Under autocast x and the weights are taken in its dtype (float64 stays).

    Args:
        x: (..., d), of any float dtype and strides.
        w_gate, w_up: (d_ff, d), as `nn.Linear` keeps them, of the same dtype.
        gate: a gate, or the name of one that has no parameters.
        impl: "auto", "reference" or "triton".

    Returns:
        (..., d_ff) in the common dtype.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit together, or a tensor parameter does not fit the result.
        GateError: there is no such gate, or a parameter of it is missing.
        ConfigError: there is no such `impl`, or it can't run here.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    ready, x, w_gate, w_up = _checked(x, w_gate, w_up, gate)
    if _choose(ready, x, w_gate, w_up, impl) == "reference":
        return reference.forward(ready, x, w_gate, w_up)
    return _triton().forward(ready, x, w_gate, w_up)


def resolve(x: Tensor, w_gate: Tensor, w_up: Tensor, gate: Activation, *, impl: str = "auto") -> str:
    """Return the implementation that `gated_linear` would run for these arguments, without running it.

    Raises:
        ShapeError, GateError, ConfigError: as `gated_linear` does.
    """
    ready, x, w_gate, w_up = _checked(x, w_gate, w_up, gate)
    return _choose(ready, x, w_gate, w_up, impl)


def _triton() -> ModuleType:
    return importlib.import_module("tensorformer.ops.gated_linear.triton")


def _choose(gate: Gate, x: Tensor, w_gate: Tensor, w_up: Tensor, impl: str) -> str:
    if impl not in IMPLS:
        raise ConfigError(f"no impl {impl!r} of gated_linear" + suggest(impl, IMPLS))
    if impl == "reference" or (impl == "auto" and x.device.type != "cuda"):
        return "reference"
    reason = _why_not(gate, x, w_gate, w_up)
    if reason is None:
        return "triton"
    if impl == "triton":
        raise ConfigError(f'impl "triton" of gated_linear {reason}')
    return "reference"


def _why_not(gate: Gate, x: Tensor, w_gate: Tensor, w_up: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return 'is not for torch.compile: write impl="reference", and Inductor fuses the gate'
    operands = (x, w_gate, w_up, *(p for p in gate.parameters.values() if isinstance(p, Tensor)))
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return 'has no gradient: call it under torch.no_grad(), or write impl="reference"'
    return _triton().why_not(gate, x.dtype, x.device)


def _checked(x: Tensor, w_gate: Tensor, w_up: Tensor, gate: Activation) -> tuple[Gate, Tensor, Tensor, Tensor]:
    """Return the gate bound and the operands in their common dtype, or refuse them; values are never read."""
    if w_gate.ndim != 2 or w_gate.shape != w_up.shape:
        raise ShapeError(
            f"w_gate has shape {tuple(w_gate.shape)} and w_up {tuple(w_up.shape)}: write (d_ff, d) for both"
        )
    if x.ndim == 0 or x.shape[-1] != w_gate.shape[1]:
        raise ShapeError(f"x has shape {tuple(x.shape)} and w_gate {tuple(w_gate.shape)}: their last axes are one, d")
    for name, t in (("x", x), ("w_gate", w_gate), ("w_up", w_up)):
        check_float(name, t)
        if t.device != x.device:
            raise ShapeError(f"{name} is on {t.device} and x on {x.device}: move one of them")
    dtype = autocast_dtype(x.device)
    if dtype is not None and torch.float64 not in (x.dtype, w_gate.dtype, w_up.dtype):
        x, w_gate, w_up = x.to(dtype), w_gate.to(dtype), w_up.to(dtype)
    if not x.dtype == w_gate.dtype == w_up.dtype:
        raise ShapeError(f"x is {x.dtype}, w_gate {w_gate.dtype} and w_up {w_up.dtype}: write .to() for one dtype")
    ready = bound(gate)
    check_parameters(ready, (*x.shape[:-1], w_gate.shape[0]), x.device)
    return ready, x, w_gate, w_up
