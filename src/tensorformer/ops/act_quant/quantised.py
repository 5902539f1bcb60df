"""The cast alone, and back: the contract of the formats."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError
from tensorformer.ops.act_quant.cast import cast, uncast
from tensorformer.ops.act_quant.formats import FORMATS, Format, known
from tensorformer.ops.operands import FLOATS


class Quantised(NamedTuple):
    """Codes (..., d_ff), for nvfp4 (..., ⌈d_ff/2⌉) bytes of two; and scales (..., groups)."""

    codes: Tensor
    scale: Tensor


def quantise(
    h: Tensor,
    format: str,
    group: int | None = None,
    *,
    tensor_scale: float | Tensor | None = None,
) -> Quantised:
    """Cast ``h`` to codes and scales: code = round(h / scale), to nearest, ties to even, saturating at ±max.

    =========  =====================================  =======================================================
    format     codes                                  scale (float32 unless said)
    =========  =====================================  =======================================================
    int8       int8, −127 … 127                       amax/127, at least 2⁻¹²⁶
    fp8_e4m3   float8_e4m3fn, ±448                    amax/448, at least 2⁻¹²⁶
    fp8_e5m2   float8_e5m2, ±57344                    amax/57344, at least 2⁻¹²⁶
    mxfp8      float8_e4m3fn; groups of 32            float8_e8m0fnu, 2^(⌊log₂ amax⌋ − 8), at least 2⁻¹²⁷
    nvfp4      e2m1, ±6, two a byte; groups of 16     float8_e4m3fn, amax/6/tensor_scale within 2⁻⁶ … 448
    =========  =====================================  =======================================================

    * An all-zero group has zero codes and the least scale.
    * A NaN makes its group's scale NaN, whatever the format, so that the whole group comes back as NaN and no
      other is touched. Its codes are NaN in fp8, and in mxfp8 where h is; the others are zero.
    * ±∞ saturates: it counts as the largest float32 (for mxfp8 as 2¹²⁸), has the largest code, and comes back as
      that or as ±∞, in nvfp4 as ±2,688·tensor_scale; its finite neighbours lose their digits to its scale.
    * mxfp8's rounding down of the exponent is the standard's (torchao's FLOOR): what exceeds 448 scales saturates.
    * The last group may be smaller than the others.

    The quotient is a true division where torchao's int8 multiplies by a reciprocal (a code may differ by one where
    the quotient is a tie but for rounding), and an all-zero fp8 group is zero where torchao's is NaN.

    Args:
        h: (..., width), any strides; bfloat16 and float16 are widened, float64 is rounded to float32 first.
        format: a key of ``FORMATS``.
        group: how many neighbours share a scale: None for the whole token; mxfp8 and nvfp4 have their own.
        tensor_scale: nvfp4 only: the second level of its scales, one positive number of the whole tensor, 1 by
            default. As in inference engines it is calibrated beforehand (:func:`nvfp4_tensor_scale`) and given, so
            that no token's codes depend on another's; it is not among the results, and `dequantise` needs it again.

    Returns:
        Codes (..., width), for nvfp4 (..., ⌈width/2⌉) uint8, the first of two codes in the low four bits (as
        torch.float4_e2m1fn_x2: ``codes.view`` it where a GEMM wants that); scales (..., ⌈width/group⌉).

    Raises:
        ConfigError: the format or group is unknown, or ``tensor_scale`` does not fit.
        ShapeError: ``h`` is not a floating tensor with an axis.

    Source: each format's is in ``FORMATS``.
    """
    spec = known(format)
    if h.dtype not in FLOATS or h.dim() == 0:
        raise ShapeError(f"h is {tuple(h.shape)} {h.dtype}: write a tensor (..., width) of float32 or another float")
    size = spec.group_of(h.shape[-1], group)
    with torch.no_grad():
        return Quantised(*cast(h, spec, size, tensor_scale_of(spec, tensor_scale)))


def dequantise(
    codes: Tensor,
    scale: Tensor,
    format: str,
    group: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    tensor_scale: float | Tensor | None = None,
    width: int | None = None,
) -> Tensor:
    """Return code · scale, the number each code stands for; the inverse of :func:`quantise` up to its rounding.

    Args:
        codes, scale, format, group, tensor_scale: what :func:`quantise` returned and was given.
        dtype: of the result; computed in float32.
        width: the last axis of the result, to be given where nvfp4 packed an odd one.

    Returns:
        (..., width).

    Raises:
        ConfigError: the format or group is unknown, or ``tensor_scale`` does not fit.
        ShapeError: codes and scales are not of this format, or do not fit together.
    """
    spec = known(format)
    for name, t, expected in (("codes", codes, spec.codes), ("scale", scale, spec.scale)):
        if t.dtype != expected:
            raise ShapeError(f"{name} is {t.dtype}: {format} has {expected}; give what quantise returned")
    if width is None:
        width = codes.shape[-1] * (2 if spec.bits == 4 else 1)
    if spec.code_width(width) != codes.shape[-1]:
        raise ShapeError(f"width={width} does not fit codes of shape {tuple(codes.shape)} in {format}")
    size = spec.group_of(width, group)
    expected = (*codes.shape[:-1], -(-width // size))
    if scale.shape != expected:
        raise ShapeError(f"scale has shape {tuple(scale.shape)}: groups of {size} in {width} make {expected}")
    with torch.no_grad():
        numbers = uncast(codes, scale, spec, size, width, tensor_scale_of(spec, tensor_scale))
        if spec.name == "int8":  # 127·(max/127) may be rounded past the largest number
            top = torch.finfo(torch.float32).max
            numbers = numbers.clamp(-top, top)
        return numbers.to(dtype)


def nvfp4_tensor_scale(h: Tensor) -> Tensor:
    """Return nvfp4's ``tensor_scale`` for numbers like those of ``h``: amax / (448·6), over the finite ones.

    With it the group of the largest magnitude gets the largest scale, 448, and a group down to 1/28,672 of that
    has one of its own (2⁻⁶; below, the codes get fewer). Source: arXiv:2509.25149.

    Args:
        h: a floating tensor of any shape, such as the activations of a calibration text.

    Returns:
        One float32, positive.
    """
    size = h.detach().float().abs()
    amax = torch.where(size.isfinite(), size, 0.0).amax() if h.numel() else size.new_zeros(())
    spec = FORMATS["nvfp4"]
    top = spec.max * torch.finfo(spec.scale).max
    return (amax / top).clamp(min=2.0**-100)


def tensor_scale_of(spec: Format, given: float | Tensor | None) -> float | Tensor:
    """Return the ``tensor_scale`` to compute with, or raise an error that says what to write."""
    if given is None:
        return 1.0
    if spec.name != "nvfp4":
        raise ConfigError(f"tensor_scale belongs to nvfp4 alone: leave it out for {spec.name}")
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.dtype not in FLOATS:
            raise ConfigError(f"tensor_scale has shape {tuple(given.shape)} and {given.dtype}: write one float")
        return given.detach().float().reshape(())
    known = isinstance(given, int | float) and not isinstance(given, bool)
    if not (known and 2.0**-100 <= given <= 2.0**100):
        raise ConfigError(f"tensor_scale={given!r}: write a finite number > 0, from 2^-100 to 2^100, or None for 1")
    return float(given)
