"""φ(g)·ψ(u) and its gradients as Triton kernels: one template, its body printed from the gate's expression."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.triton_kernel import OPTIONS, GateText, build, gate_text, on, values, why_not

__all__ = ["backward", "forward", "kernel", "why_not"]

TILE = 1024  # elements a program: eight a thread, which in bfloat16 is one 16-byte load
# What is stored into each output.
_STORED = {"h": "h", "dg": "dh*dg", "du": "dh*du"}

# Offsets are 64-bit: a row may lie past 2^31 elements, and so may a column where all is one row.
_TEMPLATE = """
@triton.jit
def {name}({arguments}, row_count, column_count, blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = (program % blocks).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < row_count) & (column < column_count)
    {lines}
"""
_LOAD = "{0} = tl.load({0}_pointer + row*{0}_row + column*{0}_column, mask=inside, other=0.0).to(tl.float32)"
_STORE = "tl.store({0}_pointer + row*{0}_row + column*{0}_column, ({1}).to({0}_pointer.dtype.element_ty), mask=inside)"


def forward(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    """Return φ(g)·ψ(u), computed in float32 and rounded once.

    Args:
        g, u: any shape and strides, one of float32, bfloat16, float16.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    h = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    _launch(gate, {"g": g, "u": u}, {"h": h})
    return h


def backward(gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
    """Write dh·∂h/∂g into ``dg`` and dh·∂h/∂u into ``du``, views of any strides; None where it isn't wanted."""
    wanted = {name: out for name, out in (("dg", dg), ("du", du)) if out is not None}
    if wanted:
        _launch(gate, {"g": g, "u": u, "dh": dh}, wanted)


def kernel(gate: Gate, outputs: tuple[str, ...]) -> Any:
    """Return the ``triton.jit`` function that writes ``outputs``: h, or those of dg and du that are wanted."""
    return _kernel(gate_text(gate, "h" not in outputs), outputs)


@functools.cache
def _kernel(text: GateText, outputs: tuple[str, ...]) -> Any:
    name = "forward" if "h" in outputs else "backward"
    loaded = ["g", "u", *(["dh"] if name == "backward" else []), *text.tensors]
    operands = [f"{n}_{part}" for n in (*loaded, *outputs) for part in ("pointer", "row", "column")]
    lines = [_LOAD.format(n) for n in loaded]
    lines += text.lines
    lines += [_STORE.format(n, _STORED[n]) for n in outputs]
    arguments = ", ".join([*operands, *text.numbers])
    return build(_TEMPLATE.format(name=name, arguments=arguments, lines="\n    ".join(lines)), name)


def _launch(gate: Gate, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    g = inputs["g"]
    if g.numel() == 0:
        return
    numbers, tensors = values(gate_text(gate, "h" not in outputs), gate.parameters)
    read = [*(x.resolve_neg() for x in inputs.values()), *(p.to(g.device).expand(g.shape) for p in tensors.values())]
    view = _collapsed([*read, *outputs.values()])
    if not all(view.fits):
        # Three strides or more: a copy has one. What is written goes through a copy and back.
        read = [x if fits else x.contiguous() for x, fits in zip(read, view.fits, strict=False)]
        written = {
            n: out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
            for (n, out), fits in zip(outputs.items(), view.fits[len(read) :], strict=True)
        }
        view = _collapsed([*read, *written.values()])
    else:
        written = outputs
    operands = []
    for x, strides in zip((*read, *written.values()), view.strides, strict=True):
        operands += [x, *strides]
    width = min(TILE, 1 << (view.columns - 1).bit_length())
    height = min(TILE // width, 1 << (view.rows - 1).bit_length())
    blocks = -(-view.columns // width)
    grid = (blocks * -(-view.rows // height),)
    with on(g.device):
        kernel(gate, tuple(outputs))[grid](
            *operands, *numbers, view.rows, view.columns, blocks, HEIGHT=height, WIDTH=width, **OPTIONS
        )
    for n, out in outputs.items():
        if written[n] is not out:
            out.copy_(written[n])


class _Matrices(NamedTuple):
    """Tensors of one shape as matrices: the size of all, (row stride, column stride) of each, and who has them."""

    rows: int
    columns: int
    strides: list[tuple[int, int]]
    fits: list[bool]


def _collapsed(tensors: Sequence[Tensor]) -> _Matrices:
    """Merge the axes that are one axis in every tensor; the last that is left is the columns, the others the rows."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for size, *given in zip(tensors[0].shape, *(x.stride() for x in tensors), strict=True):
        strides = tuple(given)
        if size == 1:
            continue
        if axes and all(outer == inner * size for outer, inner in zip(axes[-1][1], strides, strict=True)):
            axes[-1] = (axes[-1][0] * size, strides)
        else:
            axes.append((size, strides))
    nothing = (1, (0,) * len(tensors))
    *leading, (columns, column_strides) = axes or [nothing]
    row_strides = (leading or [nothing])[-1][1]
    fits = [all(a[1][i] == b[1][i] * b[0] for a, b in itertools.pairwise(leading)) for i in range(len(tensors))]
    rows = math.prod(size for size, _ in leading)
    return _Matrices(rows, columns, list(zip(row_strides, column_strides, strict=True)), fits)
