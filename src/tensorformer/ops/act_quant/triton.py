"""Gate, weight and cast as one Triton kernel: h is in registers alone, where its group's scale and its codes are found.

A group that is too wide for them is gone through twice, and the gate computed again: for the scale, then for the codes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.act_quant.cast import BIAS, LEAST, LEAST_E4M3, MANTISSA, MOST_E4M3, TOP
from tensorformer.ops.act_quant.formats import Format
from tensorformer.ops.triton_kernel import OPTIONS, GateText, build, gate_text, on, values, why_not

__all__ = ["WIDEST", "forward", "kernel", "why_not"]

TILE = 1024  # numbers a program: eight a thread, which in bfloat16 is one 16-byte load
WIDEST = 8192  # numbers of a group that a program holds at once; of a wider one, STEP at a time
STEP = 4096

# The gate has a function of its own, and its arguments a prefix: a parameter may be called as a variable here is.
# Magnitudes are compared as integers: their bits are in the order of the numbers, and a NaN is above ∞.
# Offsets are 64-bit: a row may lie past 2^31 elements, and so may a column.
_TEMPLATE = """
@triton.jit
def product({variables}):
    {gate}
    return h


@triton.jit
def minifloat(x, DIGITS: tl.constexpr, LEAST: tl.constexpr):
    # Beside 2^(23 - DIGITS) times its power of two, x is rounded to that many digits, ties to even; and from one
    # power to the next the codes count on. LEAST is the exponent of the least normal number; x has a code, or is NaN.
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, LEAST << 23)
    large = (power + ((23 - DIGITS) << 23)).to(tl.float32, bitcast=True)
    steps = (tl.abs(x) + large).to(tl.int32, bitcast=True) - large.to(tl.int32, bitcast=True)
    return tl.where(x == x, steps + (power >> (23 - DIGITS)) - (LEAST << DIGITS), 0x7F)


@triton.jit
def act_quant({arguments}, codes_pointer, scale_pointer, row_count, group_count, column_count, code_count, group, tiles,
              ROWS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    program = tl.program_id(0)
    unit = tl.arange(0, ROWS*GROUPS)
    row = (program // tiles).to(tl.int64)*ROWS + unit // GROUPS
    place = (program % tiles).to(tl.int64)*GROUPS + unit % GROUPS
    there = (row < row_count) & (place < group_count)
    {once}
    {body}
"""
_ANY = "propagate_nan=tl.PropagateNan.ALL"
_LOAD = (
    "given_{0} = tl.load(given_{0}_pointer + row[:, None]*given_{0}_row + column*given_{0}_column, "
    "mask=inside, other=0.0).to(tl.float32)"
)
_WEIGHT = "weight = tl.load(weight_pointer + row*weight_row, mask=there, other=0.0).to(tl.float32)"
_INSIDE = (
    "lane = {start} + tl.arange(0, LANES)[None, :]",
    "column = place[:, None]*group + lane",
    "inside = there[:, None] & (lane < group) & (column < column_count)",
)
_SIZE = "tl.max(h.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)"


def forward(
    gate: Gate, g: Tensor, u: Tensor, weight: Tensor | None, spec: Format, group: int, tensor_scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of φ(g)·ψ(u)·weight, computed in float32 and rounded by the cast.

    Args:
        g, u: (..., d_ff), one shape and one of float32, bfloat16, float16; of any strides, though leading axes that
            are not one axis in memory are copied. weight: (..., 1).
    """
    *leading, width = g.shape
    count = -(-width // group)
    codes = torch.empty(*leading, spec.code_width(width), dtype=spec.codes, device=g.device)
    scale = torch.empty(*leading, count, dtype=spec.scale, device=g.device)
    if g.numel() == 0:
        return codes, scale
    text = gate_text(gate)
    numbers, tensors = values(text, gate.parameters)
    rows = g.numel() // width
    operands = []
    for x in (g, u, *(p.to(g.device).expand(g.shape) for p in tensors.values())):
        matrix = x.detach().reshape(rows, width)
        operands += [matrix, *matrix.stride()]
    if weight is not None:
        column = weight.detach().reshape(rows)
        operands += [column, column.stride(0)]
    if spec.scale == torch.float8_e4m3fn:
        # A number is filled in on the device: copying it there would wait.
        given = isinstance(tensor_scale, Tensor)
        operands.append(tensor_scale.to(g.device) if given else torch.full((), tensor_scale, device=g.device))
    swept = group > WIDEST
    lanes = STEP if swept else _power(group)
    groups = min(_power(count), max(TILE // lanes, 1))
    high = min(_power(rows), max(TILE // (lanes * groups), 1))
    tiles = -(-count // groups)
    with on(g.device):
        _kernel(text, spec, weight is not None, swept)[(tiles * -(-rows // high),)](
            *operands, *numbers, _bytes(codes), scale if spec.scale == torch.float32 else _bytes(scale),
            rows, count, width, codes.shape[-1], group, tiles, ROWS=high, GROUPS=groups, LANES=lanes,
            num_warps=min(16, max(4, high * groups * lanes // 512)), **OPTIONS,
        )  # fmt: skip
    return codes, scale


def kernel(gate: Gate, spec: Format, weighted: bool = False, swept: bool = False) -> Any:
    """Return the ``triton.jit`` function; ``swept`` is the one for groups wider than ``WIDEST``."""
    return _kernel(gate_text(gate), spec, weighted, swept)


def _power(n: int) -> int:
    """Return the least power of two that is no less than ``n``."""
    return 1 << (n - 1).bit_length()


def _bytes(t: Tensor) -> Tensor:
    """Return ``t`` as what the kernel makes of it: codes as whole numbers."""
    return t if t.dtype == torch.int8 else t.view(torch.uint8)


@functools.cache
def _kernel(text: GateText, spec: Format, weighted: bool, swept: bool) -> Any:
    matrices = ("g", "u", *text.tensors)
    arguments = [f"given_{n}_{part}" for n in matrices for part in ("pointer", "row", "column")]
    arguments += ["weight_pointer", "weight_row"] * weighted
    arguments += ["whole_pointer"] * (spec.scale == torch.float8_e4m3fn)
    arguments += [f"given_{n}" for n in text.numbers]
    source = _TEMPLATE.format(
        variables=", ".join((*matrices, *text.numbers)),
        gate="\n    ".join(text.lines),
        arguments=", ".join(arguments),
        once=_WEIGHT if weighted else "",
        body="\n    ".join(_body(text, spec, weighted, swept)),
    )
    return build(source, "act_quant")


def _body(text: GateText, spec: Format, weighted: bool, swept: bool) -> list[str]:
    """Return the lines from the loads to the stores: of a group as a whole, or in two sweeps over its parts."""
    matrices = ("g", "u", *text.tensors)
    h = f"product({', '.join(f'given_{n}' for n in (*matrices, *text.numbers))})" + "*weight[:, None]" * weighted
    product = [*_INSIDE, *(_LOAD.format(n) for n in matrices), f"h = tl.where(inside, {h}, 0.0)"]
    codes = _codes(spec)
    if not swept:
        return [*(line.format(start=0) for line in product), f"peak = {_SIZE}", *_scale(spec), *codes]
    loop = "for start in range(0, group, LANES):"
    parts = [line.format(start="start") for line in product]
    return [
        "peak = tl.zeros((ROWS*GROUPS,), tl.int32)",
        *_looped(loop, [*parts, f"peak = tl.maximum(peak, {_SIZE})"]),
        *_scale(spec),
        *_looped(loop, [*parts, *codes]),
    ]


def _looped(head: str, lines: list[str]) -> list[str]:
    return [head, *(f"    {line}" for line in lines)]


def _scale(spec: Format) -> list[str]:
    """Return the lines that store a group's scale, and leave what its numbers are divided by or multiplied with."""
    lines = ["largest = peak.to(tl.float32, bitcast=True)"]
    if spec.scale == torch.float32:
        lines.append(f"scale = {_clamped(f'tl.div_rn(largest, {spec.max})', LEAST, TOP / spec.max)}")
    elif spec.scale == torch.float8_e8m0fnu:
        lines += [
            f"exponent = tl.maximum((peak >> {MANTISSA}) - {int(spec.max).bit_length() - 1}, 0)",
            f"inverse = (({2 * BIAS} - exponent) << {MANTISSA}).to(tl.float32, bitcast=True)",
            "inverse = tl.where(largest == largest, inverse, 0.0)",
            "scale = tl.where(largest == largest, exponent, 255)",
        ]
    else:
        lines += [
            "whole = tl.load(whole_pointer)",
            f"rough = {_clamped(f'tl.div_rn(tl.div_rn(largest, {spec.max}), whole)', LEAST_E4M3, MOST_E4M3)}",
            "scale = minifloat(rough, 3, 121)",
            # It is normal, and its digits are the first of a float32's.
            "factor = tl.where(rough == rough, ((scale << 20) + (120 << 23)).to(tl.float32, bitcast=True), rough)",
            "inverse = tl.div_rn(tl.div_rn(1.0, whole), factor)",
        ]
    stored = "scale.to(scale_pointer.dtype.element_ty)"
    return [*lines, f"tl.store(scale_pointer + row*group_count + place, {stored}, mask=there)"]


def _codes(spec: Format) -> list[str]:
    """Return the lines that round the quotients, and store their codes."""
    quotient = "tl.div_rn(h, scale[:, None])" if spec.scale == torch.float32 else "h*inverse[:, None]"
    lines = [f"quotient = {_clamped(quotient, -spec.max, spec.max)}"]
    if not spec.codes.is_floating_point:
        lines.append("quotient = tl.where(quotient == quotient, quotient, 0.0)")
    at, inside = "column", "inside"
    if spec.codes == torch.int8:
        # Beside 1.5·2^23 the fraction is rounded off, ties to even, and the last byte is the code.
        lines.append("code = (quotient + 12582912.0).to(tl.int32, bitcast=True)")
    else:
        digits, least = _MINIFLOATS[spec.codes]
        sign = f"(quotient.to(tl.int32, bitcast=True) >> {32 - spec.bits}) & {1 << (spec.bits - 1)}"
        lines.append(f"code = minifloat(quotient, {digits}, {least}) | ({sign})")
    if spec.bits == 4:
        lines += [
            "low, high = tl.split(tl.reshape(code, (ROWS*GROUPS, LANES // 2, 2)))",
            "code = low | (high << 4)",
            "byte = place[:, None]*(LANES // 2) + tl.arange(0, LANES // 2)[None, :]",
        ]
        at, inside = "byte", "there[:, None] & (byte < code_count)"
    stored = "code.to(codes_pointer.dtype.element_ty)"
    return [*lines, f"tl.store(codes_pointer + row[:, None]*code_count + {at}, {stored}, mask={inside})"]


# Binary digits after the point, and the (biased) exponent of the least normal number; uint8 holds two e2m1.
_MINIFLOATS = {torch.float8_e4m3fn: (3, 121), torch.float8_e5m2: (2, 113), torch.uint8: (1, 127)}


def _clamped(x: str, low: float, high: float) -> str:
    return f"tl.minimum(tl.maximum({x}, {low!r}, {_ANY}), {high!r}, {_ANY})"
