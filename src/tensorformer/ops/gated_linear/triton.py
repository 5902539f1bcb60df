"""Both matrix products and the gate in one Triton kernel: the gate is computed where the sums are, in registers.

With few rows the weights are all there is to read, and each program reads its own share: tiles are made narrow until
there is a program for every multiprocessor. (The depth is not split: a gate needs whole sums.)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops import triton_kernel
from tensorformer.ops.triton_kernel import OPTIONS, GateText, build, gate_text, on, values

_GROUP = 8  # row blocks that go together, so that they find the weights in the L2 cache

_TEMPLATE = """
@triton.jit
def gated_linear({arguments}, row_count, column_count, depth, x_step, a_step, b_step,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
                 PRECISION: tl.constexpr):
    program = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS)
    group = program // (GROUP*column_blocks)
    together = tl.minimum(row_blocks - group*GROUP, GROUP)
    place = program % (GROUP*column_blocks)
    row_block, column_block = group*GROUP + place % together, place // together
    row = (row_block.to(tl.int64)*ROWS + tl.arange(0, ROWS))[:, None]
    column = (column_block.to(tl.int64)*COLUMNS + tl.arange(0, COLUMNS))[None, :]
    k = tl.arange(0, DEPTH)
    x_at = x_pointer + row*x_row + k[None, :].to(tl.int64)*x_column
    a_at = a_pointer + column*a_row + k[:, None].to(tl.int64)*a_column
    b_at = b_pointer + column*b_row + k[:, None].to(tl.int64)*b_column
    g = tl.zeros((ROWS, COLUMNS), tl.float32)
    u = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        left = (row < row_count) & (k[None, :] < depth - start)
        right = (column < column_count) & (k[:, None] < depth - start)
        x = tl.load(x_at, mask=left, other=0.0)
        a = tl.load(a_at, mask=right, other=0.0)
        b = tl.load(b_at, mask=right, other=0.0)
        g = tl.dot(x, a, g, input_precision=PRECISION)
        u = tl.dot(x, b, u, input_precision=PRECISION)
        x_at += x_step
        a_at += a_step
        b_at += b_step
    inside = (row < row_count) & (column < column_count)
    {lines}
    tl.store(h_pointer + row*h_row + column*h_column, h.to(h_pointer.dtype.element_ty), mask=inside)
"""
_LOAD = "{0} = tl.load({0}_pointer + row*{0}_row + column*{0}_column, mask=inside, other=1.0).to(tl.float32)"


class Tile(NamedTuple):
    """What one program computes, and with what: rows × columns, in steps of depth, by warps, loading stages ahead."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile(rows: int, columns: int, item: int, processors: int, shared: int) -> Tile:
    """Return the tile for rows × columns outputs.

    Args:
        item: bytes of a number.
        processors: multiprocessors of the device.
        shared: bytes of shared memory that a program may use.
    """
    # Sums of float32 products go through the ordinary units, whose registers hold less.
    most = 128 if item == 2 else 64
    high = min(most, max(16, 1 << (rows - 1).bit_length()))
    wide, depth = most, 128 // item
    while wide > 16 and (
        -(-rows // high) * -(-columns // wide) < processors or 2 * _stage(high, wide, depth, item) > shared
    ):
        wide //= 2
    stages = min(4, max(2, shared // _stage(high, wide, depth, item)))
    # Four warps have no registers left for SiTU's epilogue at 128 x 64.
    return Tile(high, wide, depth, 8 if high * wide >= 128 * 64 else 4, stages)


def _stage(rows: int, columns: int, depth: int, item: int) -> int:
    return (rows + 2 * columns) * depth * item


def why_not(gate: Gate, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why it can't run, and what to do about it; None where it can."""
    reason = triton_kernel.why_not(gate, dtype, device)
    if reason is None and dtype == torch.bfloat16 and triton_kernel.interpreting():
        return "can't run in bfloat16 under TRITON_INTERPRET=1, whose products are wrong: write .float()"
    return reason


def forward(gate: Gate, x: Tensor, w_gate: Tensor, w_up: Tensor, tiled: Tile | None = None) -> Tensor:
    """Return φ(x W_gᵀ)·ψ(x W_uᵀ), summed in float32 and rounded once.

    Args:
        x: (..., d), any strides.
        w_gate, w_up: (d_ff, d), any strides.
        tiled: the tile, if not the usual one.

    Returns:
        A new contiguous (..., d_ff).
    """
    columns, depth = w_gate.shape
    h = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if h.numel() == 0:
        return h
    numbers, tensors = values(gate_text(gate), gate.parameters)
    matrix = x.reshape(-1, depth) if depth else x.new_empty(h.numel() // columns, 0)
    rows = matrix.shape[0]
    size = tiled or tile(rows, columns, x.element_size(), *_device(x.device))
    spread = (p.to(x.device).expand(h.shape).reshape(rows, columns) for p in tensors.values())
    operands = []
    for t in (matrix, w_gate, w_up, *spread, h.view(rows, columns)):
        operands += [t, *t.stride()]
    steps = [size.depth * t.stride(1) for t in (matrix, w_gate, w_up)]
    grid = (-(-rows // size.rows) * -(-columns // size.columns),)
    exact = x.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"
    with on(x.device):
        kernel(gate)[grid](
            *operands, *numbers, rows, columns, depth, *steps,
            ROWS=size.rows, COLUMNS=size.columns, DEPTH=size.depth, GROUP=_GROUP,
            PRECISION="ieee" if exact else "tf32",
            num_warps=size.warps, num_stages=size.stages, **OPTIONS,
        )  # fmt: skip
    return h


def kernel(gate: Gate) -> Any:
    """Return the ``triton.jit`` function with the gate in its epilogue."""
    return _kernel(gate_text(gate))


@functools.cache
def _kernel(text: GateText) -> Any:
    operands = [f"{n}_{part}" for n in ("x", "a", "b", *text.tensors, "h") for part in ("pointer", "row", "column")]
    lines = [*(_LOAD.format(n) for n in text.tensors), *text.lines]
    arguments = ", ".join([*operands, *text.numbers])
    return build(_TEMPLATE.format(arguments=arguments, lines="\n    ".join(lines)), "gated_linear")


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return the multiprocessors and the shared memory of a program; an H100's where kernels are interpreted."""
    if device.type != "cuda":
        return 132, 232448
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)  # ROCm has one
    return properties.multi_processor_count, shared
