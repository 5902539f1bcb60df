"""The launches of the kernels: sizes of tiles, strides, and the memory that is written."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts import triton_activation
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.triton_rows import Rows
from tensorformer.ops.triton_kernel import OPTIONS, on, values

STAGES = 3  # of loading ahead
# Elements of a tile that four warps have registers for; larger tiles take eight. (ptxas for sm_90 spills none.)
ROOM, ROOM_WITH_ACTIVATION = 64 * 128, 32 * 64


def widest(dtype: torch.dtype) -> int:
    """Return the most rows, or columns, of a tile: float32 is multiplied in registers, and has fewer."""
    return 128 if dtype.itemsize == 2 else 64


def projections(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, activation: Activation, rows: Rows, kept: Tensor | None
) -> Tensor:
    """Return h (rows, d_ff) sorted by expert; write the projections into ``kept`` (rows, columns), if it is there."""
    weights = activation.views(gate_up)
    d_ff = weights[0].shape[2]
    h = torch.empty((len(rows.order), d_ff), dtype=x.dtype, device=x.device)
    numbers, tensors = _parameters(activation, len(gate_up), d_ff, x.device, backward=False)
    biases = (None,) * len(weights) if bias is None else activation.views(bias)
    places = (None,) * len(weights) if kept is None else activation.views(kept)
    size = _tile(rows, d_ff, x.dtype, most=64)
    _launch(
        triton_activation.projections(activation.gate),
        len(rows.tiles) * -(-d_ff // size["COLUMNS"]),
        [
            *_strided(x), *_strided(*weights), *_given(biases, x, 2), *_given(places, x, 2), *tensors, *numbers,
            h, rows.tiles, rows.token, d_ff, x.shape[1], *_steps(size, *(w.stride(1) for w in weights), x.stride(1)),
        ],
        {**size, "BIASED": bias is not None, "KEPT": kept is not None},
        ROOM_WITH_ACTIVATION,
    )  # fmt: skip
    return h


def products(left: Tensor, right: Tensor, bias: Tensor | None, share: Tensor | None, rows: Rows) -> Tensor:
    """Return share·(left @ right[e] + bias[e]), a row for each choice of an expert, in the order of the routing.

    Args:
        left: (rows, depth), sorted by expert.
        right: (E, depth, columns).
        bias: (E, columns).
        share: (rows,), sorted by expert.
        rows: what is sorted.
    """
    columns = right.shape[2]
    out = torch.empty((len(rows.order), columns), dtype=left.dtype, device=left.device)
    size = _tile(rows, columns, left.dtype, most=widest(left.dtype))
    _launch(
        _kernels().products,
        len(rows.tiles) * -(-columns // size["COLUMNS"]),
        [
            *_strided(left, right), *_given((bias,), left, 2), left if share is None else share, out, rows.tiles,
            rows.order, columns, left.shape[1], *_steps(size, left.stride(1), right.stride(1)),
        ],
        {**size, "BIASED": bias is not None, "SHARED": share is not None},
    )  # fmt: skip
    return out


def gradients(
    dy: Tensor,
    down: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    share: Tensor,
    activation: Activation,
    rows: Rows,
    d_pre: Tensor | None,
    sent: Tensor | None,
    share_wanted: bool,
) -> Tensor | None:
    """Return the gradient of each routing weight (N·k,) in the order of the routing, if it is wanted.

    Args:
        dy: (N, d).
        down: (E, d_ff, d). bias: (E, d), of the second products.
        kept: the projections (rows, columns).
        share: the routing weight of each row, float32.
        activation: between the products.
        rows: what is sorted.
        d_pre: where the gradients of the projections go, if they are wanted.
        sent: (rows, d_ff), where share·h goes, if it is wanted.
    """
    d_ff = down.shape[1]
    size = _tile(rows, d_ff, dy.dtype, most=64)
    blocks = max(1, -(-d_ff // size["COLUMNS"]))
    shape = (len(rows.order), blocks) if share_wanted else (0,)
    d_share = torch.empty(shape, dtype=torch.float32, device=dy.device)
    numbers, tensors = _parameters(activation, len(down), d_ff, dy.device, backward=True)
    pre = activation.views(kept)
    places = (None,) * len(pre) if d_pre is None else activation.views(d_pre)
    _launch(
        triton_activation.gradients(activation.gate),
        len(rows.tiles) * blocks,
        [
            *_strided(dy, down), *_given((bias,), dy, 2), *_strided(*pre), *_given(places, dy, 2), *tensors, *numbers,
            dy if sent is None else sent, d_share, share, rows.tiles, rows.token, rows.order, d_ff, dy.shape[1],
            *_steps(size, dy.stride(1), down.stride(2)),
        ],
        {
            **size,
            "BIASED": bias is not None,
            "INNER": d_pre is not None,
            "SENT": sent is not None,
            "D_SHARE": share_wanted,
        },
        ROOM_WITH_ACTIVATION,
    )  # fmt: skip
    return d_share.sum(1) if share_wanted else None


def transposed_products(
    left: Tensor,
    right: Tensor,
    rows: Rows,
    out: Tensor | None,
    total: Tensor | None,
    share: Tensor | None = None,
) -> None:
    """Write leftᵀ @ right of each expert into ``out`` (E, height, width), and totals of right into ``total``.

    Args:
        left, right: one has a row for each token, the other, which is right unless there are shares, one for each row
            that is sorted.
        rows: what is sorted.
        out: None where it is not wanted. total: (E, width), likewise.
        share: the routing weight of each row: rows of right are totalled with it.
    """
    out = None if out is None or out.numel() == 0 else out
    if out is None and total is None:
        return
    # Totals alone are one row of blocks, of a product that isn't taken.
    height, width = 1 if out is None else left.shape[1], right.shape[1]
    most = widest(left.dtype)
    size = {
        "ROWS": _power(height, most), "COLUMNS": _power(width, most),
        "DEPTH": min(rows.height, 128 // left.dtype.itemsize),
    }  # fmt: skip
    _launch(
        _kernels().transposed_products,
        (len(rows.begins) - 1) * -(-height // size["ROWS"]) * -(-width // size["COLUMNS"]),
        [
            *_strided(left, right), *_given((out,), left, 3), *_given((total,), left, 2),
            left if share is None else share, rows.begins, rows.token, height, width,
        ],
        {**size, "LEFT_SORTED": share is not None, "WANTED": out is not None, "TOTALLED": total is not None},
    )  # fmt: skip


def _launch(kernel: Any, programs: int, operands: Sequence[Any], constants: dict[str, Any], room: int = ROOM) -> None:
    if programs == 0:
        return
    first = operands[0]
    exact = first.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"
    large = constants["ROWS"] * constants["COLUMNS"] > room
    with on(first.device):
        kernel[(programs,)](
            *operands, **constants, PRECISION="ieee" if exact else "tf32",
            num_warps=8 if large else 4, num_stages=STAGES, **OPTIONS,
        )  # fmt: skip


def _tile(rows: Rows, columns: int, dtype: torch.dtype, most: int) -> dict[str, int]:
    return {"ROWS": rows.height, "COLUMNS": _power(columns, most), "DEPTH": 128 // dtype.itemsize}


def _power(size: int, most: int) -> int:
    """Return the least power of two that is no less than ``size``, that a product takes, and that is not too much."""
    return min(most, max(16, 1 << max(0, size - 1).bit_length()))


def _steps(size: dict[str, int], *strides: int) -> list[int]:
    """Return how far each operand goes between one tile and the next, along the axis that is summed."""
    return [size["DEPTH"] * stride for stride in strides]


def _strided(*operands: Tensor) -> list[Tensor | int]:
    """Return every operand with its strides after it."""
    return [argument for x in operands for argument in (x, *x.stride())]


def _given(operands: Sequence[Tensor | None], other: Tensor, axes: int) -> list[Tensor | int]:
    """Return every operand with its strides; one that isn't there is another tensor, which the kernel won't touch."""
    nothing = [other, *(0 for _ in range(axes))]
    return [argument for x in operands for argument in (nothing if x is None else (x, *x.stride()))]


def _parameters(
    activation: Activation, experts: int, d_ff: int, device: torch.device, backward: bool
) -> tuple[list[float], list[Tensor | int]]:
    """Return the parameters that are numbers, and those that are tensors with their strides over experts and d_ff."""
    text = triton_activation.activation_text(activation.gate, backward)
    numbers, tensors = values(text, activation.gate.parameters)
    spread = [t.to(device).expand(experts, 1, d_ff) for t in tensors.values()]
    return numbers, [argument for t in spread for argument in (t, t.stride(0), t.stride(2))]


def _kernels() -> Any:
    return importlib.import_module("tensorformer.ops.grouped_experts.triton_kernels")
