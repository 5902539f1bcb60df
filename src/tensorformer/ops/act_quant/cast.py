"""The casts: a group's largest magnitude gives its scale, the quotients are rounded to codes, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.ops.act_quant import fp4
from tensorformer.ops.act_quant.formats import Format

TOP = torch.finfo(torch.float32).max
# No scale is less: its reciprocal stays finite, also where subnormal numbers are taken as zero.
LEAST = torch.finfo(torch.float32).smallest_normal
LEAST_E4M3 = torch.finfo(torch.float8_e4m3fn).smallest_normal
MOST_E4M3 = torch.finfo(torch.float8_e4m3fn).max
MANTISSA, BIAS = 23, 127


def cast(h: Tensor, spec: Format, group: int, tensor_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``h``: (..., width) of any floating dtype, taken as float32.

    The last group may be partial: it is filled up with zeros, which no scale and no code notices.
    """
    grouped = _grouped(h.float(), group)
    amax = grouped.abs().amax(-1)
    if spec.scale == torch.float32:
        scale, quotient = _by_amax(grouped, amax, spec.max)
    elif spec.scale == torch.float8_e8m0fnu:
        scale, quotient = _by_power_of_two(grouped, amax, spec.max)
    else:
        scale, quotient = _by_two_levels(grouped, amax, spec.max, tensor_scale)
    return _encode(quotient.flatten(-2)[..., : h.shape[-1]], spec), scale


def uncast(codes: Tensor, scale: Tensor, spec: Format, group: int, width: int, tensor_scale: float | Tensor) -> Tensor:
    """Return code · scale in float32, (..., width)."""
    values = fp4.decode(fp4.unpack(codes)[..., :width]) if spec.bits == 4 else codes.float()
    factor = scale.float()
    if spec.scale == torch.float8_e4m3fn:
        factor = tensor_scale * factor
    return (_grouped(values, group) * factor.unsqueeze(-1)).flatten(-2)[..., :width]


def _grouped(x: Tensor, group: int) -> Tensor:
    width = x.shape[-1]
    count = -(-width // group)
    if count * group != width:
        x = F.pad(x, (0, count * group - width))
    return x.unflatten(-1, (count, group))


def _by_amax(x: Tensor, amax: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Scale = amax/most. ±∞ counts as the largest float32; a NaN makes the scale NaN."""
    scale = (amax / amax.new_full((), most)).clamp(LEAST, TOP / most)
    return scale, x / scale.unsqueeze(-1)


def _by_power_of_two(x: Tensor, amax: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Scale = 2^(⌊log₂ amax⌋ − ⌊log₂ most⌋), read off amax's own exponent; ±∞ has 2^128, a NaN makes it NaN."""
    exponent = amax.view(torch.int32) >> MANTISSA
    biased = (exponent - (int(most).bit_length() - 1)).clamp(min=0)
    # 2^−s instead of a division by 2^s: exact, and never subnormal, as 2^−127 is.
    inverse = ((2 * BIAS - biased) << MANTISSA).view(torch.float32)
    nan = amax.isnan()
    scale = torch.where(nan, 255, biased).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale, x * inverse.masked_fill(nan, 0.0).unsqueeze(-1)


def _by_two_levels(x: Tensor, amax: Tensor, most: float, tensor_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Scale = amax/most/tensor_scale rounded to a normal e4m3: as much as 1/16 off, which the codes make up for."""
    whole = torch.as_tensor(tensor_scale, dtype=torch.float32, device=x.device)
    scale = (amax / amax.new_full((), most) / whole).clamp(LEAST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn)
    return scale, x * (whole.reciprocal() / scale.float()).unsqueeze(-1)


def _encode(quotient: Tensor, spec: Format) -> Tensor:
    """Round to codes; the quotients are nobody else's, and are overwritten."""
    bounded = quotient.clamp_(-spec.max, spec.max)
    if spec.codes.is_floating_point:
        return bounded.to(spec.codes)
    # No integer and no e2m1 is NaN: the scale says it, and the code is zero.
    bounded.nan_to_num_(0.0)
    return fp4.pack(fp4.encode(bounded)) if spec.bits == 4 else bounded.round_().to(spec.codes)
