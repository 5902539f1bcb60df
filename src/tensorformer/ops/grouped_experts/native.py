"""Experts in C++: each on one thread, from gathered tokens to outputs; built on first use, for float32 and bfloat16."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import Gate
from tensorformer.gates.kernel import PLAIN, recording, transforming
from tensorformer.ops import native_build, native_kernels
from tensorformer.ops.grouped_experts import native_call
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.native_call import Kernels, Routing
from tensorformer.ops.native_kernels import C_TYPES

_BUILT: dict[Hashable, Kernels | None] = {}  # None: not in the cache when it was looked for


def why_not(operands: Operands, activation: Activation) -> str | None:
    """Say why these are not for C++, and what to do about it; None where they are. What is missing, `prepare` says."""
    x = operands.x
    if x.device.type != "cpu":
        return f'runs on the CPU, not on {x.device.type}: write impl="auto"'
    if not torch.compiler.is_compiling() and (
        recording() or transforming() or any(type(t) not in PLAIN for t in operands.given())
    ):
        return 'is invisible to tensor subclasses, modes, tracers and transforms: write impl="auto"'
    if x.dtype not in C_TYPES:
        return f'computes float32 and bfloat16, not {x.dtype}: write impl="fast"'
    if tensors := list(activation.tensors):
        return f'takes parameters as numbers, and {tensors[0]} is a tensor: bind a float, or write impl="fast"'
    return None


def is_ready(activation: Activation, dtype: torch.dtype) -> bool:
    """Say whether the kernels of an activation were built before and met their laws; builds nothing, and remembers."""
    if dtype not in C_TYPES or activation.tensors or native_call.blas() is None:
        return False
    key = _key(activation, dtype)
    if key not in _BUILT:
        found = native_kernels.find(lambda: _library(activation), dtype, lambda lib, t: _open(lib, activation, t))
        native_kernels.remember(_BUILT, key, found)
    return _BUILT.get(key) is not None


def prepare(activation: Activation, dtype: torch.dtype) -> None:
    """Have the kernels of an activation ready: from the cache, or else compiled (seconds) and held to their laws.

    Raises:
        ConfigError: they can't be built here, or break a law; says why.
        GateError: the formula uses a function that has no C++ form.
        StorageError: the cache can't be written.
    """
    _prepared(activation, dtype)


def groups_of(operands: Operands, indices: Tensor) -> Routing:
    """Return the routing, which the first pass sorts."""
    return Routing(indices.to(torch.int64).contiguous())


def forward(operands: Operands, groups: Routing, activation: Activation, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return y (N, d), and the projections (N·k, 2·d_ff) sorted by expert, if they are to be kept.

    Args:
        operands: in one dtype, but for the routing weights; any strides.
        groups: the routing.
        activation: between the products; parameters are numbers.
        keep: whether there will be a backward.

    Raises:
        ShapeError: an index names no expert.
        ConfigError, GateError: as `prepare` does.
    """
    return native_call.forward(_prepared(activation, operands.x.dtype), operands, groups, activation, keep)


def backward(
    operands: Operands, groups: Routing, activation: Activation, kept: Tensor, dy: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradient of each operand, None where it is not needed.

    Args:
        operands, groups, activation: as in ``forward``.
        kept: the projections it returned.
        dy: (N, d), any strides.
        needed: for each operand, whether its gradient is wanted.

    Raises:
        ConfigError, GateError: as `prepare` does.
    """
    return native_call.backward(_prepared(activation, operands.x.dtype), operands, groups, activation, kept, dy, needed)


def _missing() -> str | None:
    """Say what this machine lacks."""
    if native_call.blas() is None:
        return 'multiplies by the MKL inside of torch, and this torch has none: write impl="fast"'
    return native_build.why_not()


def _key(activation: Activation, dtype: torch.dtype) -> Hashable:
    given = tuple((s._formula, s._names, s._given) for s in _scalars(activation))
    return given, dtype


def _scalars(activation: Activation) -> tuple[Any, ...]:
    gate = activation.gate
    return (gate.gate, gate.value) if isinstance(gate, Gate) else (gate,)


def _parameters(activation: Activation) -> dict[str, float]:
    """Return the parameters that are in the formula, by name, in the order the kernels take them."""
    bound = activation._replace(gate=activation.gate.bind())  # raises where one is missing
    return native_kernels.numbers(_scalars(bound))


def _prepared(activation: Activation, dtype: torch.dtype) -> Kernels:
    found = _BUILT.get(_key(activation, dtype))
    if found is None:
        if reason := _missing():
            raise ConfigError(f"native experts of {activation.gate.name}: {reason}")
        found = native_kernels.build(
            _library(activation),
            dtype,
            lambda lib, t: _open(lib, activation, t),
            lambda kernels: _hold_to_laws(kernels, activation, dtype),
        )
        native_kernels.remember(_BUILT, _key(activation, dtype), found)
    return found


def _library(activation: Activation) -> native_build.Library:
    from tensorformer.ops.grouped_experts.native_source import native_source

    return native_build.Library(native_source(activation, list(_parameters(activation))), activation.gate.name)


def _open(library: native_build.Library, activation: Activation, dtype: torch.dtype) -> Kernels:
    loaded, values = library.load(), list(_parameters(activation).values())
    loaded.route.argtypes, loaded.route.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
    found = [getattr(loaded, f"{name}_{C_TYPES[dtype]}") for name in ("room", "forward", "backward")]
    for function, returned in zip(found, (ctypes.c_int64, None, None), strict=True):
        function.argtypes, function.restype = [ctypes.c_void_p], returned
    array = (ctypes.c_float * max(1, len(values)))(*values)
    return Kernels(loaded.route, found[0], found[1], found[2], array)


@final
class _Untried:
    """Kernels that are not to be used yet, as an implementation."""

    groups_of = staticmethod(groups_of)

    def __init__(self, kernels: dict[torch.dtype, Kernels]) -> None:
        self._kernels = kernels

    def forward(self, operands: Operands, *rest: Any) -> tuple[Tensor, Tensor | None]:
        return native_call.forward(self._kernels[operands.x.dtype], operands, *rest)

    def backward(self, operands: Operands, *rest: Any) -> list[Tensor | None]:
        return native_call.backward(self._kernels[operands.x.dtype], operands, *rest)


def _hold_to_laws(kernels: dict[torch.dtype, Kernels], activation: Activation, dtype: torch.dtype) -> None:
    from tensorformer.ops.grouped_experts.native_check import violations

    broken = violations(_Untried(kernels), activation, dtype)
    native_kernels.refuse(f"the native experts of {activation.gate.name} break their laws", broken, dtype)
