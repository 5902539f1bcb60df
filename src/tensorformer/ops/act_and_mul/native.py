"""A gate in C++: printed from its formula, compiled on first use, and run on CPU tensors where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import Gate
from tensorformer.ops import native_build, native_kernels
from tensorformer.ops.native_kernels import C_TYPES

_VIEW = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_HEAD = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class _Kernels(NamedTuple):
    """The two functions of a gate's library for one dtype, and the values of the gate's parameters."""

    forward: Any
    backward: Any
    parameters: Any  # a C array, kept alive here
    address: int


_BUILT: dict[Hashable, _Kernels | None] = {}  # None: not in the cache when it was looked for


def why_not(gate: Gate, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why the C++ kernel of ``gate`` can't run, and what to do about it; None where it can."""
    if device.type != "cpu":
        return f"runs on the CPU, not on {device.type}: write impl='auto'"
    if dtype not in C_TYPES:
        return f"computes float32 and bfloat16, not {dtype}: write impl='fast'"
    if tensors := _tensors(gate):
        return f"takes parameters as numbers, and {tensors[0]} is a tensor: bind a float, or write impl='fast'"
    return native_build.why_not()


def is_ready(gate: Gate, dtype: torch.dtype) -> bool:
    """Say whether the kernel of ``gate`` was built before and met its laws; builds nothing, and remembers."""
    key = _key(gate, dtype)
    if key not in _BUILT:
        if dtype not in C_TYPES or _tensors(gate):
            return False
        found = native_kernels.find(lambda: _library(gate), dtype, lambda lib, t: _open(lib, gate, t))
        native_kernels.remember(_BUILT, key, found)
    return _BUILT.get(key) is not None


def prepare(gate: Gate, dtype: torch.dtype) -> None:
    """Have the kernel of ``gate`` ready: from the cache, or else compiled (about a second) and held to its laws.

    Raises:
        ConfigError: it can't run or be built here, or breaks a law; says why.
        GateError: the gate's formula uses a function that has no C++ form.
        StorageError: the cache can't be written.
    """
    _prepared(gate, dtype)


def forward(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    """Return φ(g)·ψ(u), computed in float32 and rounded once.

    Args:
        gate: parameters are numbers.
        g, u: one shape, float32 or bfloat16, any strides; they are only read.

    Returns:
        A new contiguous tensor.

    Raises:
        ConfigError, GateError: as `prepare` does.
    """
    return _forward(_prepared(gate, g.dtype), g, u)


def backward(gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
    """Write dh·ψ(u)·φ′(g) into ``dg`` and dh·φ(g)·ψ′(u) into ``du``, each rounded once.

    Args:
        gate: parameters are numbers.
        g, u, dh: one shape and dtype, any strides; they are only read.
        dg, du: views to write into, of any strides that do not overlap; None where not wanted.

    Raises:
        ConfigError, GateError: as `prepare` does.
    """
    _backward(_prepared(gate, g.dtype), g, u, dh, dg, du)


def _key(gate: Gate, dtype: torch.dtype) -> tuple[Any, ...]:
    φ, ψ = gate.gate, gate.value
    return φ._formula, φ._names, φ._given, ψ._formula, ψ._names, ψ._given, dtype


def _tensors(gate: Gate) -> list[str]:
    return [n for n, v in gate.parameters.items() if isinstance(v, Tensor)]


def _prepared(gate: Gate, dtype: torch.dtype) -> _Kernels:
    kernels = _BUILT.get(_key(gate, dtype))
    return _build(gate, dtype) if kernels is None else kernels


def _build(gate: Gate, dtype: torch.dtype) -> _Kernels:
    reason = why_not(gate, dtype, torch.device("cpu"))
    if reason is not None:
        raise ConfigError(f"the native kernel of {gate.name} {reason}")
    kernels = native_kernels.build(
        _library(gate), dtype, lambda lib, t: _open(lib, gate, t), lambda found: _hold_to_laws(found, gate, dtype)
    )
    native_kernels.remember(_BUILT, _key(gate, dtype), kernels)
    return kernels


def _library(gate: Gate) -> native_build.Library:
    from tensorformer.ops.act_and_mul.native_source import native_source

    return native_build.Library(native_source(gate, list(_parameters(gate))), gate.name)


def _parameters(gate: Gate) -> dict[str, float]:
    """Return the parameters that are in the formula, by name, in the order the kernel takes them."""
    gate = gate.bind()  # raises where one is missing
    return native_kernels.numbers((gate.gate, gate.value))


def _open(library: native_build.Library, gate: Gate, dtype: torch.dtype) -> _Kernels:
    loaded, values = library.load(), list(_parameters(gate).values())
    found = [getattr(loaded, f"{way}_{C_TYPES[dtype]}") for way in ("forward", "backward")]
    for function, views in zip(found, (3, 5), strict=True):
        function.argtypes, function.restype = [*_HEAD, *(_VIEW * views)], None
    array = (ctypes.c_float * max(1, len(values)))(*values)
    return _Kernels(found[0], found[1], array, ctypes.addressof(array))


def _hold_to_laws(kernels: dict[torch.dtype, _Kernels], gate: Gate, dtype: torch.dtype) -> None:
    from tensorformer.ops.act_and_mul.check import violations

    def run_forward(_: Gate, g: Tensor, u: Tensor) -> Tensor:
        return _forward(kernels[g.dtype], g, u)

    def run_backward(_: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
        _backward(kernels[g.dtype], g, u, dh, dg, du)

    broken = violations(run_forward, run_backward, gate, dtype)
    native_kernels.refuse(f"the native kernel of {gate.name} breaks its laws", broken, dtype)


def _forward(kernels: _Kernels, g: Tensor, u: Tensor) -> Tensor:
    h = torch.empty(g.shape, dtype=g.dtype, device=g.device)  # whatever the default device
    g, u = g.resolve_neg(), u.resolve_neg()
    if h.numel():
        if g.is_contiguous() and u.is_contiguous():
            rows, columns = 1, g.numel()
            views = g.data_ptr(), 0, 1, u.data_ptr(), 0, 1
        else:
            g, u = _table(g), _table(u)
            rows, columns = g.shape
            views = g.data_ptr(), *g.stride(), u.data_ptr(), *u.stride()
        kernels.forward(rows, columns, native_kernels.threads(), kernels.address, *views, h.data_ptr(), columns, 1)
    return h


def _backward(kernels: _Kernels, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
    if not g.numel():
        return
    g, u, dh = (_table(t.resolve_neg()) for t in (g, u, dh))
    outs = [None if t is None else _writable(t) for t in (dg, du)]
    pointers = [x for t in (g, u, dh) for x in (t.data_ptr(), *t.stride())]
    pointers += [x for t in outs for x in ((None, 0, 0) if t is None else (t.data_ptr(), *t.stride()))]
    kernels.backward(*g.shape, native_kernels.threads(), kernels.address, *pointers)
    for wanted, out in zip((dg, du), outs, strict=True):
        if wanted is not None and out is not None and out.data_ptr() != wanted.data_ptr():
            wanted.copy_(out.view(wanted.shape))


def _table(t: Tensor) -> Tensor:
    """Return ``t`` as (rows, columns): a view where its strides allow one, else a copy."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1] if t.dim() else 1)


def _writable(t: Tensor) -> Tensor:
    """Return ``t`` as (rows, columns), or new memory of that shape where no view of it is one."""
    columns = t.shape[-1] if t.dim() else 1
    try:
        return t if t.dim() == 2 else t.view(-1, columns)
    except RuntimeError:
        return torch.empty(t.numel() // columns, columns, dtype=t.dtype, device=t.device)
