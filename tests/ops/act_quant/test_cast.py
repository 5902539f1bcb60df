"""The cast and its inverse: the nearest code, the declared scale, no group touched by another; zeros, ±∞ and NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.ops.act_quant import FORMATS, Quantised, dequantise, nvfp4_tensor_scale, quantise
from tests.ops.act_quant.quant_laws import (
    CASES,
    FREE,
    GRIDS,
    SIZES,
    bits,
    cast_violations,
    error_violations,
    groups_of,
    same,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(("format", "group"), CASES)
def test_the_laws_hold(format: str, group: int | None) -> None:
    for width in (1, 7, 77):
        assert cast_violations(quantise, format, group, width) == []


@given(
    case=st.sampled_from([*CASES, ("int8", 1000)]),
    tokens=st.integers(0, 4),
    width=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    size=st.floats(-3, 3),
    seed=st.integers(0, 99),
)
def test_every_number_gets_its_nearest_code(
    case: tuple[str, int | None], tokens: int, width: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    format, group = case
    h = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)) * 10**size).to(dtype)
    result = quantise(h, format, group)
    assert result.codes.dtype == FORMATS[format].codes
    assert result.codes.shape == (tokens, -(-width // 2) if format == "nvfp4" else width)
    assert result.scale.dtype == FORMATS[format].scale
    assert result.scale.shape == (tokens, len(groups_of(width, format, group)))
    assert error_violations(h.float().double(), result, format, group) == []


@pytest.mark.parametrize("format", GRIDS)
def test_a_tie_goes_to_the_even_code(format: str) -> None:
    grid = GRIDS[format]
    # The largest number fixes the scale at 1; mxfp8's groups need one of 256 … 511 each, nvfp4's a 6.
    between = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    size = FORMATS[format].group or len(between) + 1
    for start in range(0, len(between), size - 1):
        part = between[start : start + size - 1]
        h = torch.tensor([*part, *[0.0] * (size - 1 - len(part)), grid[-1]])
        codes, scale = quantise(h, format)
        assert scale.float().tolist() == [1.0]
        back = dequantise(codes, scale, format, width=size).tolist()
        for i, got in enumerate(back[: len(part)], start):
            assert got == (grid[i] if i % 2 == 0 else grid[i + 1]), between[i]


@pytest.mark.parametrize("format", GRIDS)
def test_every_code_is_its_own_image(format: str) -> None:
    grid = torch.tensor(GRIDS[format])
    size = FORMATS[format].group or len(grid)
    for part in grid.split(size - 1):
        h = torch.cat([part, grid[-1:]]) if len(part) < size else part
        for signed in (h, -h):
            assert torch.equal(dequantise(*quantise(signed, format), format, width=len(h)), signed)


@pytest.mark.parametrize(("format", "group"), CASES)
def test_zeros_come_back_as_zeros(format: str, group: int | None) -> None:
    codes, scale = quantise(torch.zeros(2, 45), format, group)
    assert bits(codes).count_nonzero() == 0
    least = {"mxfp8": 2.0**-127, "nvfp4": 2.0**-6}.get(format, 2.0**-126)
    assert set(scale.float().flatten().tolist()) == {least}
    assert torch.equal(dequantise(codes, scale, format, group, width=45), torch.zeros(2, 45))


@pytest.mark.parametrize("format", [*FREE, "mxfp8"])
def test_numbers_next_to_nothing_keep_their_nearest_code(format: str) -> None:
    for size in (1e-30, 2.0**-119, 2.0**-126, 1e-40, 1e-44):
        h = torch.tensor([1.0, -0.7, 0.3, 0.0]) * size
        codes, scale = quantise(h, format)
        back = dequantise(codes, scale, format).double()
        half = scale.double() * {"int8": 0.5, "fp8_e5m2": 4096}.get(format, 16)
        assert ((back - h.double()).abs() <= half).all(), size
        assert back.isfinite().all()


@pytest.mark.parametrize(("format", "group"), CASES)
def test_a_nan_is_its_whole_group(format: str, group: int | None) -> None:
    h = torch.randn(3, 45)
    clean = quantise(h, format, group)
    h[1, 0] = math.nan
    codes, scale = quantise(h, format, group)
    back = dequantise(codes, scale, format, group, width=45)
    first = groups_of(45, format, group)[0].stop
    assert back[1, :first].isnan().all()
    assert back[1, first:].isfinite().all()
    assert back[[0, 2]].isfinite().all()
    assert scale[1, 0].float().isnan()
    if format in ("int8", "nvfp4"):
        count = first if format == "int8" else first // 2
        assert bits(codes)[1, :count].count_nonzero() == 0
    else:
        assert codes[1, 0].float().isnan()
        assert all(n != n if format != "mxfp8" else n == 0 for n in codes[1, 1:first].float().tolist())
    assert same(Quantised(codes[[0, 2]], scale[[0, 2]]), Quantised(clean.codes[[0, 2]], clean.scale[[0, 2]]))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("format", "group"), CASES)
def test_infinity_saturates(format: str, group: int | None, sign: float) -> None:
    h = torch.randn(3, 45)
    h[1, 0] = sign * math.inf
    codes, scale = quantise(h, format, group)
    back = dequantise(codes, scale, format, group, width=45)
    first = groups_of(45, format, group)[0].stop
    assert back[1, 0] * sign >= (2688.0 if format == "nvfp4" else 3.4e38)
    assert scale.float().isfinite().all()
    assert back[1, 1:].isfinite().all()
    assert back[1, 1:first].abs().sum() == 0 or format == "nvfp4"
    assert torch.equal(back[1, first:], dequantise(*quantise(h[1, first:], format, group), format, group,
                                                   width=45 - first))  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 7), (1,), (2, 1, 3)])
def test_empty_and_small_shapes(format: str, shape: tuple[int, ...]) -> None:
    result = quantise(torch.ones(shape), format)
    torch.testing.assert_close(dequantise(*result, format, width=shape[-1]), torch.ones(shape), rtol=0.04, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_any_strides_and_nothing_past_the_end(format: str) -> None:
    store = torch.full((9, 4, 50), math.nan)
    inside = store[1:8, 1:3, 5:42]
    inside.copy_(torch.randn(7, 2, 37))
    expected = quantise(inside.contiguous(), format)
    assert same(quantise(inside, format), expected)
    assert dequantise(*expected, format, width=37).isfinite().all()
    slanted = inside.permute(1, 2, 0)
    assert same(quantise(slanted, format), quantise(slanted.contiguous(), format))
    same_row = inside[:1].expand(6, 2, 37)
    assert same(quantise(same_row, format), quantise(same_row.contiguous(), format))


@pytest.mark.parametrize("format", FORMATS)
def test_inputs_stay_as_they_are(format: str) -> None:
    h = torch.randn(4, 32)
    before = h.clone()
    codes, scale = quantise(h, format)
    kept = bits(codes).clone(), bits(scale).clone()
    dequantise(codes, scale, format)
    assert torch.equal(h, before)
    assert torch.equal(bits(codes), kept[0])
    assert torch.equal(bits(scale), kept[1])


def test_nvfp4_packs_two_a_byte_low_first() -> None:
    h = torch.tensor([6.0, -0.5, 1.0, 0.0, -4.0])
    codes, scale = quantise(h, "nvfp4")
    assert codes.tolist() == [0x97, 0x02, 0x0E]
    assert scale.float().tolist() == [1.0]
    assert torch.equal(dequantise(codes, scale, "nvfp4", width=5), h)


def test_a_tensor_scale_is_a_second_level() -> None:
    h = torch.randn(64, 96) * 1e-3
    flat = dequantise(*quantise(h, "nvfp4"), "nvfp4")
    whole = nvfp4_tensor_scale(h)
    assert float(whole) == pytest.approx(float(h.abs().max()) / 2688, rel=1e-6)
    codes, scale = quantise(h, "nvfp4", tensor_scale=whole)
    assert scale.float().max() == 448
    two = dequantise(codes, scale, "nvfp4", tensor_scale=whole)
    assert (two - h).norm() < 0.12 * h.norm()
    assert (flat - h).norm() > 0.9 * h.norm()
    assert same(quantise(h, "nvfp4", tensor_scale=float(whole)), Quantised(codes, scale))


def test_a_tensor_scale_is_taken_over_finite_numbers_and_never_zero() -> None:
    assert float(nvfp4_tensor_scale(torch.tensor([math.nan, -2688.0, math.inf]))) == 1.0
    for h in (torch.zeros(3), torch.ones(0), torch.full((2,), math.nan)):
        whole = nvfp4_tensor_scale(h)
        assert whole > 0
        back = dequantise(*quantise(torch.zeros(16), "nvfp4", tensor_scale=whole), "nvfp4", tensor_scale=whole)
        assert torch.equal(back, torch.zeros(16))


def test_dequantise_rounds_to_the_dtype_asked_for() -> None:
    h = torch.randn(3, 32)
    result = quantise(h, "int8")
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(dequantise(*result, "int8", dtype=dtype), dequantise(*result, "int8").to(dtype))


def test_no_gradient_comes_out() -> None:
    h = torch.randn(3, 32, requires_grad=True)
    for format in FORMATS:
        assert not any(t.requires_grad for t in quantise(h, format))


def _truncating(h: Tensor, format: str, group: int | None) -> Quantised:
    scale = quantise(h, format, group).scale
    return Quantised((h / scale).clamp(-127, 127).nan_to_num(0).trunc().to(torch.int8), scale)


def _wrong_axis(h: Tensor, format: str, group: int | None) -> Quantised:
    scale = h.abs().amax(0, keepdim=True).clamp(max=3.4e38) / 127
    codes = (h / scale).round().nan_to_num(0).to(torch.int8)
    return Quantised(codes, scale.amax(-1, keepdim=True).expand(len(h), 1))


def _doubled(h: Tensor, format: str, group: int | None) -> Quantised:
    codes, scale = quantise(h, format, group)
    return Quantised(codes, (scale.float() * 2).to(scale.dtype))


def _half_as_fine(h: Tensor, format: str, group: int | None) -> Quantised:
    """Codes and scales agree, but the scale is twice what the format says."""
    doubled = torch.cat([h, 2 * h.abs().nan_to_num(0).amax(-1, keepdim=True)], -1)
    codes, scale = quantise(doubled, format, group)
    return Quantised(codes[..., :-1], scale)


def _whole_tensor(h: Tensor, format: str, group: int | None) -> Quantised:
    codes, scale = quantise(h.flatten(), format, group)
    return Quantised(codes.view(h.shape), scale.expand(len(h), 1))


@pytest.mark.parametrize("broken", [_truncating, _wrong_axis, _doubled, _half_as_fine, _whole_tensor])
def test_a_broken_cast_is_caught(broken: Callable[[Tensor, str, int | None], Quantised]) -> None:
    assert cast_violations(broken, "int8", None) != []


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4"])
def test_a_scale_off_by_a_power_of_two_is_caught(format: str) -> None:
    assert cast_violations(_doubled, format, None) != []


def test_the_largest_number_comes_back_finite() -> None:
    h = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    for format in FORMATS:
        assert dequantise(*quantise(h, format), format, width=2).isfinite().all()
