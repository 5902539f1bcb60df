"""One call of the C++: what the task points at, held until it is done."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from tensorformer.ops import native_kernels
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands, check_indices
from tensorformer.ops.grouped_experts.native_task import Stack, Task


class Kernels(NamedTuple):
    """The functions of an activation's library for one dtype, and the values of its parameters."""

    route: Any
    room: Any
    forward: Any
    backward: Any
    parameters: Any  # a C array


class Blas(NamedTuple):
    """Addresses in the library that torch multiplies with."""

    sgemm: int
    limit: int


@final
class Routing:
    """Which experts each token goes to, and, once that is known, the rows sorted by expert."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self.plan: Tensor | None = None


def forward(
    kernels: Kernels, operands: Operands, groups: Routing, activation: Activation, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y, and the projections if they are to be kept."""
    x, rows = operands.x, groups.indices.numel()
    call = _Call(kernels, operands, groups, activation)
    y, kept = x.new_empty(x.shape), x.new_empty(rows, operands.gate_up.shape[2]) if keep else None
    call.points(outs=x.new_empty(rows, x.shape[1]), y=y, kept=kept)
    call.run(kernels.forward)
    return y, kept


def backward(
    kernels: Kernels,
    operands: Operands,
    groups: Routing,
    activation: Activation,
    kept: Tensor,
    dy: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradient of each operand, None where it is not needed."""
    x = operands.x
    call = _Call(kernels, operands, groups, activation)
    call.row("dy", dy)
    found = [torch.empty_like(t) if n and t is not None else None for t, n in zip(operands, needed, strict=False)]
    names = ("dx", "d_first", "d_second", "d_shares", "d_first_bias", "d_second_bias")
    written = [
        None if grad is None else call.place(name, grad, torch.float32 if name == "d_shares" else grad.dtype)
        for name, grad in zip(names, found, strict=True)
    ]
    call.points(kept=kept, outs=x.new_empty(len(kept), x.shape[1]) if needed[0] else None)
    call.run(kernels.backward)
    for grad, into in zip(found, written, strict=True):
        if grad is not None and into is not None and into is not grad:
            grad.copy_(into)
    return found


@final
class _Call:
    """One task on its way: it holds the tensors that the task points at."""

    def __init__(self, kernels: Kernels, operands: Operands, groups: Routing, activation: Activation) -> None:
        x, gate_up, down, weights, gate_up_bias, down_bias = operands
        found = blas()
        assert found is not None
        self._task, self._kernels, self._held = Task(), kernels, []
        task = self._task
        task.tokens, task.top_k = weights.shape
        task.experts, task.d, task.columns = gate_up.shape
        task.d_ff, task.threads = down.shape[1], max(1, min(native_kernels.threads(), weights.numel()))
        task.g_at, task.u_at, task.apart = _halves(activation, down.shape[1])
        task.sgemm, task.limit = found
        task.parameters = ctypes.addressof(kernels.parameters)
        self.points(shares=weights.to(torch.float32).contiguous().resolve_neg())
        self.points(first_bias=_dense(gate_up_bias), second_bias=_dense(down_bias))
        self.row("x", x)
        task.first, task.second = (self._stack(_matrices(t)) for t in (gate_up, down))
        self._route(groups)

    def points(self, **tensors: Tensor | None) -> None:
        """Point fields at contiguous tensors."""
        for name, t in tensors.items():
            if t is not None:
                self._held.append(t)
                setattr(self._task, name, t.data_ptr())

    def row(self, name: str, t: Tensor) -> None:
        """Point a field at rows of numbers side by side, and say how far apart they are."""
        t = t.resolve_neg()
        if t.stride(1) != 1 and t.shape[1] > 1:
            t = t.contiguous()
        self.points(**{name: t})
        setattr(self._task, f"{name}_step", t.stride(0))

    def place(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Point a field at where a gradient is to be written, which is ``like`` if that has the right form."""
        if like.dim() == 3:
            into = like if _form(like) is not None else torch.empty(like.shape, dtype=dtype, device="cpu")
            setattr(self._task, name, self._stack(into))
        else:
            fits = like.dtype == dtype and like.is_contiguous()
            into = like if fits else torch.empty(like.shape, dtype=dtype, device="cpu")
            self.points(**{name: into})
        return into

    def run(self, function: Any) -> None:
        """Call C++ with memory for every thread."""
        task = ctypes.byref(self._task)
        size = self._kernels.room(task) * self._task.threads
        room = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
        self._task.room = room.data_ptr() + -room.data_ptr() % 64
        function(task)

    def _stack(self, t: Tensor) -> Stack:
        form = _form(t)
        assert form is not None
        self._held.append(t)
        return Stack(t.data_ptr(), t.stride(0), *form)

    def _route(self, groups: Routing) -> None:
        if groups.plan is None:
            plan = torch.empty(self._task.experts + 1 + 2 * groups.indices.numel(), dtype=torch.int64, device="cpu")
            self.points(plan=plan)
            if not self._kernels.route(ctypes.byref(self._task), groups.indices.data_ptr()):
                check_indices(groups.indices, self._task.experts)
            groups.plan = plan
        self.points(plan=groups.plan)


def _halves(activation: Activation, d_ff: int) -> tuple[int, int, int]:
    """Return where g and u begin in a row of projections, and the step between numbers of each."""
    if activation.layout == "interleaved":
        return 0, 1, 2
    return (d_ff, 0, 1) if activation.layout == "up_gate" else (0, d_ff, 1)


def _form(t: Tensor) -> tuple[int, bool] | None:
    """Return the step between rows of each expert's matrix, or between columns and True; None if it has neither."""
    _, rows, columns = t.shape
    _, down, right = t.stride()
    if (right == 1 or columns <= 1) and (down >= columns or rows <= 1):
        return max(1, columns, down if rows > 1 else 0), False
    if (down == 1 or rows <= 1) and (right >= rows or columns <= 1):
        return max(1, rows, right if columns > 1 else 0), True
    return None


def _matrices(t: Tensor) -> Tensor:
    t = t.resolve_neg()
    return t if _form(t) is not None else t.contiguous()


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.resolve_neg().contiguous()


@functools.cache
def blas() -> Blas | None:
    """Find the product of floats in torch's own library: another BLAS in the process would have threads of its own."""
    if not torch.backends.mkl.is_available():
        return None
    folder = Path(torch.__file__).parent / "lib"
    for file in sorted(folder.glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(file))
            functions = library.sgemm_, library.MKL_Set_Num_Threads_Local
        except (OSError, AttributeError):
            continue
        return Blas(*(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions))
    return None
