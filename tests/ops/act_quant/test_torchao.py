"""torchao's own casts, bit for bit where the definitions agree; and where they do not, exactly how."""

from __future__ import annotations

import itertools
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorformer.ops.act_quant import dequantise, fp4, nvfp4_tensor_scale, quantise
from tests.ops.act_quant.quant_laws import bits, minifloat

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def ao() -> Any:
    """Return torchao's casts, whose import is not silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        from torchao.prototype.mx_formats import kernels, mx_tensor, nvfp4_tensor
        from torchao.quantization import quant_primitives
    return SimpleNamespace(kernels=kernels, mx=mx_tensor, nv=nvfp4_tensor, primitives=quant_primitives)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return tensors (tokens, 192) of many sizes, with zeros, ±max and single outliers among them."""
    h = torch.randn(24, 192) * torch.logspace(-25, 25, 24)[:, None]
    h[3, :64] = 0
    h[4, 7] = -1e4 * h[4].abs().max()
    mixed = torch.randn(24, 192) * torch.logspace(-2, 2, 192)
    even = torch.randint(-9, 10, (24, 192)) / 2.0
    return [t.to(dtype) for t in (h, mixed, even, torch.zeros(2, 192))]


@pytest.mark.parametrize("group", [192, 64, 32])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8(ao: Any, format: str, group: int) -> None:
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[format]
    for h in inputs():
        scale = ao.primitives._choose_scale_float8(h, [1, group], dtype)
        codes = ao.primitives._quantize_affine_float8(h, scale, dtype)
        ours = quantise(h, format, group)
        some = (scale >= 2.0**-126).repeat_interleave(group, -1)
        assert torch.equal(ours.scale[scale >= 2.0**-126], scale[scale >= 2.0**-126])
        assert torch.equal(bits(ours.codes)[some], bits(codes)[some])
        # An all-zero group: theirs is 0/0, ours has a least scale.
        assert (codes.float()[~some & (h == 0)]).isnan().all()
        assert (ours.codes.float()[~some & (h == 0)] == 0).all()


@pytest.mark.parametrize("group", [192, 64])
def test_int8(ao: Any, group: int) -> None:
    for h in inputs():
        scale, zero = ao.primitives.choose_qparams_affine(
            h, ao.primitives.MappingType.SYMMETRIC, (1, group), torch.int8, -127, 127, keepdim=True
        )
        codes = ao.primitives.quantize_affine(h, (1, group), scale, zero, torch.int8, -127, 127)
        ours = quantise(h, "int8", group)
        assert torch.equal(ours.scale, scale)
        # Theirs multiplies by the rounded reciprocal: another code only where the quotient is next to a tie.
        other = ours.codes != codes
        quotient = (h.double() / scale.double().repeat_interleave(group, -1))[other].abs()
        assert ((quotient.frac() - 0.5).abs() <= quotient * 2.0**-22).all()
        assert ((ours.codes.int() - codes.int()).abs() <= 1).all()
        theirs = ao.primitives.dequantize_affine(codes, (1, group), scale, zero, torch.int8, -127, 127)
        assert torch.equal(dequantise(codes, scale, "int8", group), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8(ao: Any, dtype: torch.dtype) -> None:
    for h in inputs(dtype):
        h[0, 5], h[1, 40] = math.inf, -math.inf
        theirs = ao.mx.MXTensor.to_mx(h, torch.float8_e4m3fn, 32)
        ours = quantise(h, "mxfp8")
        assert torch.equal(bits(ours.scale), bits(theirs.scale))
        assert torch.equal(bits(ours.codes), bits(theirs.qdata))
        assert torch.equal(dequantise(*ours, "mxfp8"), theirs.dequantize(torch.float32))


def test_mxfp8_with_nan(ao: Any) -> None:
    h = torch.randn(4, 64)
    h[2, 5] = math.nan
    theirs = ao.mx.MXTensor.to_mx(h, torch.float8_e4m3fn, 32)
    ours = quantise(h, "mxfp8")
    assert torch.equal(bits(ours.scale), bits(theirs.scale))
    assert torch.equal(ours.codes.float().nan_to_num(999.0), theirs.qdata.float().nan_to_num(999.0))


def test_mxfp8_next_to_nothing_is_half_as_large_in_torchao(ao: Any) -> None:
    """Below 2⁻¹¹⁸ the scale is 2⁻¹²⁷ on both sides, but torchao divides by 2⁻¹²⁶ and multiplies by 2⁻¹²⁷."""
    for size, ratio in ((2.0**-118, 1.0), (2.0**-119, 0.5)):
        h = torch.linspace(1, 1.75, 32)[None] * size
        theirs = ao.mx.MXTensor.to_mx(h, torch.float8_e4m3fn, 32)
        ours = quantise(h, "mxfp8")
        assert torch.equal(bits(ours.scale), bits(theirs.scale))
        assert torch.equal(theirs.qdata.float(), ours.codes.float() * ratio)
        assert ((dequantise(*ours, "mxfp8") - h).abs() <= h / 16).all()


@pytest.mark.parametrize("two_levels", [False, True])
def test_nvfp4(ao: Any, two_levels: bool) -> None:
    for h in inputs():
        h[0, 5], h[1, 40] = math.inf, -math.inf
        whole = nvfp4_tensor_scale(h) if two_levels else None
        theirs = ao.nv.NVFP4Tensor.to_nvfp4(h, per_tensor_scale=whole)
        ours = quantise(h, "nvfp4", tensor_scale=whole)
        assert torch.equal(bits(ours.scale), bits(theirs.scale))
        assert torch.equal(ours.codes, theirs.qdata)
        assert torch.equal(dequantise(*ours, "nvfp4", tensor_scale=whole), theirs.dequantize(torch.float32))


def test_the_tensor_scale(ao: Any) -> None:
    h = torch.randn(5, 7)
    theirs = ao.nv.per_tensor_amax_to_scale(h.abs().max())
    assert torch.equal(nvfp4_tensor_scale(h), theirs)


def test_nvfp4_with_nan(ao: Any) -> None:
    h = torch.randn(2, 32)
    h[1, 3] = math.nan
    theirs = ao.nv.NVFP4Tensor.to_nvfp4(h)
    ours = quantise(h, "nvfp4")
    assert torch.equal(ours.scale.float().nan_to_num(999.0), theirs.scale.float().nan_to_num(999.0))
    clean = torch.ones(2, 16, dtype=torch.bool)
    clean[1, :8] = False  # theirs has whatever bits a NaN leaves, ours zeros
    assert torch.equal(ours.codes[clean], theirs.qdata[clean])
    assert ours.codes[1, :8].count_nonzero() == 0


def test_e2m1_everywhere(ao: Any) -> None:
    grid = minifloat(2, 1, 6.0)
    ties = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(grid)] + grid)
    near = [torch.nextafter(ties, torch.full_like(ties, t)) for t in (-9.0, 9.0)]
    x = torch.cat([ties, *near, torch.linspace(0, 6, 4001), torch.rand(1000) * 1e-3]).clamp(0, 6)
    x = torch.cat([x, -x])
    assert torch.equal(fp4.encode(x), ao.kernels.f32_to_f4_unpacked(x))
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(fp4.decode(codes), ao.kernels.f4_unpacked_to_f32(codes))
    assert torch.equal(fp4.pack(codes), ao.kernels.pack_uint4(codes))
    assert torch.equal(fp4.unpack(fp4.pack(codes)), codes)
