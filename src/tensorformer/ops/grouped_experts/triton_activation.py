"""Products whose epilogue is the activation: printed from its formula, and computed where the sums are, in registers.

The names in a formula are anybody's: parameters come as ``given_…``, and take their own names behind the products,
where what else is read has names that no parameter may have.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from tensorformer.gates import Gate, Scalar
from tensorformer.ops.triton_kernel import GateText, build, gate_text

_TEXTS: dict[tuple[Any, ...], GateText] = {}

_TILE = """
    program_row = tl.program_id(0)
    blocks_row = tl.maximum(tl.cdiv(column_count, COLUMNS), 1)
    tile_at = tile_pointer + (program_row // blocks_row).to(tl.int64)*3
    expert_row, start, stop = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    if start >= stop:
        return
    row = start + tl.arange(0, ROWS)
    there_row = row < stop
    column = (program_row % blocks_row).to(tl.int64)*COLUMNS + tl.arange(0, COLUMNS)
    inside_column = column < column_count
    token = tl.load(token_pointer + row, mask=there_row, other=0)
    k = tl.arange(0, DEPTH).to(tl.int64)
"""
_EPILOGUE = """
    row, column = row[:, None], column[None, :]
    inside = there_row[:, None] & inside_column[None, :]
"""

_PROJECTIONS = """
@triton.jit
def projections(x_pointer, x_row, x_column, {operands}, h_pointer, tile_pointer, token_pointer, column_count, depth,
                {steps}, x_step, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
                KEPT: tl.constexpr, PRECISION: tl.constexpr):
    {tile}
    x_at = x_pointer + token[:, None]*x_row + k[None, :]*x_column
    {begin}
    for done in range(0, depth, DEPTH):
        x = tl.load(x_at, mask=there_row[:, None] & (k[None, :] < depth - done), other=0.0)
        right = inside_column[None, :] & (k[:, None] < depth - done)
        {step}
        x_at += x_step
    {epilogue}
    {end}
    {lines}
    tl.store(h_pointer + row*column_count + column, h.to(h_pointer.dtype.element_ty), mask=inside)
"""
# Of each projection, g and u.
_BEGIN = """
{0} = tl.zeros((ROWS, COLUMNS), tl.float32)
w_{0} = {0}_weight_pointer + expert_row*{0}_weight_expert
w_{0} += k[:, None]*{0}_weight_row + column[None, :]*{0}_weight_column
"""
_STEP = """
{0} = tl.dot(x, tl.load(w_{0}, mask=right, other=0.0), {0}, input_precision=PRECISION)
w_{0} += {0}_step
"""
_END = """
if BIASED:
    bias_at = {0}_bias_pointer + expert_row*{0}_bias_expert + column*{0}_bias_column
    {0} += tl.load(bias_at, mask=inside_column[None, :], other=0.0).to(tl.float32)
if KEPT:
    kept_at = {0}_kept_pointer + row*{0}_kept_row + column*{0}_kept_column
    tl.store(kept_at, {0}.to({0}_kept_pointer.dtype.element_ty), mask=inside)
"""

_GRADIENTS = """
@triton.jit
def gradients(dy_pointer, dy_row, dy_column, down_pointer, down_expert, down_row, down_column,
              bias_pointer, bias_expert, bias_column, {operands}, h_pointer, d_share_pointer, share_pointer,
              tile_pointer, token_pointer, order_pointer, column_count, depth, dy_step, down_step,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
              INNER: tl.constexpr, SENT: tl.constexpr, D_SHARE: tl.constexpr, PRECISION: tl.constexpr):
    {tile}
    dy_at = dy_pointer + token[:, None]*dy_row + k[None, :]*dy_column
    down_at = down_pointer + expert_row*down_expert + k[:, None]*down_column + column[None, :]*down_row
    dh = tl.zeros((ROWS, COLUMNS), tl.float32)
    met_row = tl.zeros((ROWS,), tl.float32)
    for done in range(0, depth, DEPTH):
        dy = tl.load(dy_at, mask=there_row[:, None] & (k[None, :] < depth - done), other=0.0)
        down = tl.load(down_at, mask=inside_column[None, :] & (k[:, None] < depth - done), other=0.0)
        dh = tl.dot(dy, down, dh, input_precision=PRECISION)
        if D_SHARE and BIASED:
            bias_at = bias_pointer + expert_row*bias_expert + (done + k)*bias_column
            bias = tl.load(bias_at, mask=k < depth - done, other=0.0)
            met_row += tl.sum(dy.to(tl.float32)*bias.to(tl.float32)[None, :], 1)
        dy_at += dy_step
        down_at += down_step
    share_row = tl.load(share_pointer + row, mask=there_row, other=0.0)
    place_row = tl.load(order_pointer + row, mask=there_row, other=0)
    {epilogue}
    {load}
    {lines}
    if D_SHARE:
        block_row = program_row % blocks_row
        met_row = tl.where(block_row == 0, met_row, 0.0) + tl.sum(tl.where(inside, dh*h, 0.0), 1)
        tl.store(d_share_pointer + place_row*blocks_row + block_row, met_row, mask=there_row)
    if SENT:
        h *= share_row[:, None]
        tl.store(h_pointer + row*column_count + column, h.to(h_pointer.dtype.element_ty), mask=inside)
    if INNER:
        dh *= share_row[:, None]
        {store}
"""
_LOAD = """
{0} = tl.load({0}_kept_pointer + row*{0}_kept_row + column*{0}_kept_column, mask=inside, other=0.0).to(tl.float32)
"""
_STORE = """
{0}_column = d{0}_pointer + row*d{0}_row + column*d{0}_column
tl.store({0}_column, (dh*d{0}).to(d{0}_pointer.dtype.element_ty), mask=inside)
"""
_PARAMETER = """
given_at = given_{0}_pointer + expert_row*given_{0}_expert + column*given_{0}_column
{0} = tl.load(given_at, mask=inside_column[None, :], other=1.0).to(tl.float32)
"""


def activation_text(activation: Gate | Scalar, backward: bool) -> GateText:
    """Return the Triton that computes h from g (and u), backward dg (and du) too; printed once for each formula.

    Raises:
        GateError: the formula uses a function that has no Triton form.
    """
    if isinstance(activation, Gate):
        return gate_text(activation, backward)
    tensors = tuple(n for n in activation._names if isinstance(activation.parameters.get(n), Tensor))
    key = (backward, activation._formula, activation._names, tensors)
    if key not in _TEXTS:
        lines = activation.triton_body("g", "h", "dg" if backward else None)
        numbers = tuple(n for n in activation._names if n not in tensors)
        _TEXTS[key] = GateText(numbers, tensors, tuple(lines))
    return _TEXTS[key]


def projections(activation: Gate | Scalar) -> Any:
    """Return the ``triton.jit`` function of the first products, with the activation behind them."""
    return _projections(activation_text(activation, False), _halves(activation))


def gradients(activation: Gate | Scalar) -> Any:
    """Return the ``triton.jit`` function of dh, with the gradients of the activation behind it."""
    return _gradients(activation_text(activation, True), _halves(activation))


def _halves(activation: Gate | Scalar) -> tuple[str, ...]:
    return ("g", "u") if isinstance(activation, Gate) else ("g",)


@functools.cache
def _projections(text: GateText, halves: tuple[str, ...]) -> Any:
    operands = [f"{n}_weight_{part}" for n in halves for part in ("pointer", "expert", "row", "column")]
    operands += [f"{n}_bias_{part}" for n in halves for part in ("pointer", "expert", "column")]
    operands += [f"{n}_kept_{part}" for n in halves for part in ("pointer", "row", "column")]
    source = _PROJECTIONS.format(
        operands=_arguments(operands, text),
        steps=", ".join(f"{n}_step" for n in halves),
        tile=_TILE.strip(),
        begin=_each(_BEGIN, halves, 1),
        step=_each(_STEP, halves, 2),
        epilogue=_EPILOGUE.strip(),
        end=_each(_END, halves, 1),
        lines=_lines(text),
    )
    return build(source, "projections")


@functools.cache
def _gradients(text: GateText, halves: tuple[str, ...]) -> Any:
    operands = [f"{n}_kept_{part}" for n in halves for part in ("pointer", "row", "column")]
    operands += [f"d{n}_{part}" for n in halves for part in ("pointer", "row", "column")]
    source = _GRADIENTS.format(
        operands=_arguments(operands, text),
        tile=_TILE.strip(),
        epilogue=_EPILOGUE.strip(),
        load=_each(_LOAD, halves, 1),
        lines=_lines(text),
        store=_each(_STORE, halves, 2),
    )
    return build(source, "gradients")


def _arguments(operands: list[str], text: GateText) -> str:
    parameters = [f"given_{n}_{part}" for n in text.tensors for part in ("pointer", "expert", "column")]
    return ", ".join([*operands, *parameters, *(f"given_{n}" for n in text.numbers)])


def _lines(text: GateText) -> str:
    loaded = [_each(_PARAMETER, text.tensors, 1)] if text.tensors else []
    return "\n    ".join([*loaded, *(f"{n} = given_{n}" for n in text.numbers), *text.lines])


def _each(template: str, halves: tuple[str, ...], depth: int) -> str:
    """Return the template of every projection, at a depth of indentation."""
    return ("\n" + "    " * depth).join(line for n in halves for line in template.strip("\n").format(n).splitlines())
