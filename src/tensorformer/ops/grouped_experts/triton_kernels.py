"""Products of rows sorted by expert, without an activation in them.

Each program has a tile of the table: rows of one expert. What it reads and writes is masked where the tile ends.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def products(
    left_pointer, left_row, left_column,
    right_pointer, right_expert, right_row, right_column,
    bias_pointer, bias_expert, bias_column,
    share_pointer, out_pointer, tile_pointer, order_pointer, column_count, depth, left_step, right_step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write share·(left @ right[e] + bias[e]) of each row to its place in the routing.

    left is sorted by expert and out is not: it is contiguous, with a row for each choice of an expert.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(column_count, COLUMNS)
    tile = tile_pointer + (program // blocks).to(tl.int64) * 3
    expert, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start >= stop:
        return
    row = start + tl.arange(0, ROWS)
    there = row < stop
    column = (program % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < column_count
    k = tl.arange(0, DEPTH).to(tl.int64)
    left_at = left_pointer + row[:, None] * left_row + k[None, :] * left_column
    right_at = right_pointer + expert * right_expert + k[:, None] * right_row + column[None, :] * right_column
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, depth, DEPTH):
        left = tl.load(left_at, mask=there[:, None] & (k[None, :] < depth - done), other=0.0)
        right = tl.load(right_at, mask=inside[None, :] & (k[:, None] < depth - done), other=0.0)
        out = tl.dot(left, right, out, input_precision=PRECISION)
        left_at += left_step
        right_at += right_step
    if BIASED:
        bias = tl.load(bias_pointer + expert * bias_expert + column * bias_column, mask=inside, other=0.0)
        out += bias.to(tl.float32)[None, :]
    if SHARED:
        out *= tl.load(share_pointer + row, mask=there, other=0.0)[:, None]
    place = tl.load(order_pointer + row, mask=there, other=0)
    at = out_pointer + place[:, None] * column_count + column[None, :]
    tl.store(at, out.to(out_pointer.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
@no_type_check
def transposed_products(
    left_pointer, left_row, left_column,
    right_pointer, right_row, right_column,
    out_pointer, out_expert, out_row, out_column,
    total_pointer, total_expert, total_column,
    share_pointer, begin_pointer, token_pointer, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEFT_SORTED: tl.constexpr,
    WANTED: tl.constexpr, TOTALLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write leftᵀ @ right of each expert's rows, and the total of the rows of right; zero for an expert without rows.

    One of the two is sorted by expert, the other has a row for each token. Rows of tokens are totalled with their
    shares. WANTED: the products are; TOTALLED: the totals.
    """
    program = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    expert = (program // (row_blocks * column_blocks)).to(tl.int64)
    block = program // column_blocks % row_blocks
    m = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = (program % column_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(begin_pointer + expert), tl.load(begin_pointer + expert + 1)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(begin, end, DEPTH):
        row = start + tl.arange(0, DEPTH)
        there = row < end
        token = tl.load(token_pointer + row, mask=there, other=0)
        at = right_pointer + (token if LEFT_SORTED else row)[:, None] * right_row + n[None, :] * right_column
        right = tl.load(at, mask=there[:, None] & (n < width)[None, :], other=0.0)
        if WANTED:
            at = left_pointer + (row if LEFT_SORTED else token)[:, None] * left_row + m[None, :] * left_column
            left = tl.load(at, mask=there[:, None] & (m < height)[None, :], other=0.0)
            out = tl.dot(tl.trans(left), right, out, input_precision=PRECISION)
        if TOTALLED:
            rows = right.to(tl.float32)
            if LEFT_SORTED:
                rows *= tl.load(share_pointer + row, mask=there, other=0.0)[:, None]
            total += tl.sum(rows, 0)
    if WANTED:
        at = out_pointer + expert * out_expert + m[:, None] * out_row + n[None, :] * out_column
        tl.store(at, out.to(out_pointer.dtype.element_ty), mask=(m < height)[:, None] & (n < width)[None, :])
    if TOTALLED and block == 0:
        total_at = total_pointer + expert * total_expert + n * total_column
        tl.store(total_at, total.to(total_pointer.dtype.element_ty), mask=n < width)
