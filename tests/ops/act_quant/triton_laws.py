"""The laws of the Triton kernel, under Triton's interpreter: test_triton.py runs this file in its own process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate, Scalar
from tensorformer.gates.examples import example
from tensorformer.ops.act_and_mul import triton as act_and_mul
from tensorformer.ops.act_quant import FORMATS, Quantised, act_quant, quantise, resolve, triton
from tests.ops.act_quant.quant_laws import CASES, GRIDS, SIZES, error_violations, fused_violations, same
from tests.ops.interpreted import far_apart

NAN, INF = math.nan, math.inf
BILINEAR = GATES["bilinear"]


def operands(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Draw g, u and a weight a token, tokens of unlike size."""
    draws = torch.Generator().manual_seed(sum(shape))
    g, u = torch.randn(2, *shape, generator=draws) * torch.logspace(-2, 1, shape[0]).view(-1, *(1 for _ in shape[1:]))
    weight = torch.rand(*shape[:-1], 1, generator=draws) + 0.1
    return g.to(dtype), u.to(dtype), weight.to(dtype)


def expected(gate: Gate, g: Tensor, u: Tensor, weight: Tensor | None, format: str, group: int | None) -> Quantised:
    """Return the reference's cast of the product as the same printed lines compute it: their exp isn't torch's."""
    h = act_and_mul.forward(gate, g.float(), u.float())
    return quantise(h if weight is None else h * weight.float(), format, group)


def fused(*args: Any, **kwargs: Any) -> Quantised:
    return act_quant(*args, **kwargs, impl="triton")


def assert_same(gate: Gate, g: Tensor, u: Tensor, weight: Tensor | None, format: str, group: int | None) -> None:
    found = act_quant((g, u), gate, format=format, group=group, weight=weight, impl="triton")
    assert same(found, expected(gate, g, u, weight, format, group)), (gate.name, format, group, g.shape, g.dtype)
    if gate is BILINEAR:
        assert same(found, act_quant((g, u), gate, format=format, group=group, weight=weight, impl="reference"))
    assert all(t.is_contiguous() for t in found)


@contextmanager
def narrow(widest: int = 32, step: int = 16) -> Iterator[None]:
    """Make few numbers too many to be held at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "WIDEST", widest)
        patch.setattr(triton, "STEP", step)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("format", "group"), CASES)
def test_codes_and_scales_are_the_reference_s_to_the_bit(format: str, group: int | None, dtype: torch.dtype) -> None:
    for name in ("bilinear", "swiglu", "situ"):
        g, u, weight = operands(2, 3, 63, dtype=dtype)
        for w in (None, weight):
            assert_same(example(GATES[name]), g, u, w, format, group)


@pytest.mark.parametrize("width", SIZES)
def test_odd_widths(width: int) -> None:
    for format, group in CASES:
        if group != 1 or width < 100:
            assert_same(BILINEAR, *operands(3, width), format, group)


@pytest.mark.parametrize("name", sorted(GATES))
def test_every_gate_against_float64(name: str) -> None:
    assert fused_violations(fused, example(GATES[name]), "int8", None, width=37) == []


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_groups_gone_through_twice(format: str) -> None:
    for width, group in ((33, None), (131, 50)):
        g, u, weight = operands(2, width)
        for name in ("bilinear", "swiglu"):
            once = act_quant((g, u), name, format=format, group=group, weight=weight, impl="triton")
            with narrow():
                assert_same(GATES[name], g, u, weight, format, group)
                assert same(act_quant((g, u), name, format=format, group=group, weight=weight, impl="triton"), once)


def test_a_token_too_wide_to_be_held() -> None:
    g, u, weight = operands(2, triton.WIDEST + 5)
    assert_same(BILINEAR, g, u, weight, "int8", None)
    assert_same(BILINEAR, g, u, weight, "fp8_e4m3", triton.WIDEST + 1)


@settings(max_examples=10)
@given(patterns=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=80), group=st.sampled_from([None, 5]))
def test_any_float_at_all(patterns: list[int], group: int | None) -> None:
    g = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    for format, spec in FORMATS.items():
        assert_same(BILINEAR, g, torch.ones_like(g), None, format, None if spec.group else group)


@pytest.mark.parametrize("format", FORMATS)
def test_ties_and_all_codes(format: str) -> None:
    grid = torch.tensor(GRIDS[format])
    between = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(between, torch.full_like(between, s)) for s in (0.0, INF)]
    h = torch.cat((grid, between, *near))
    group = FORMATS[format].group or len(h) + 1
    h = torch.nn.functional.pad(h, (0, -len(h) % (group - 1))).view(-1, group - 1)
    h = torch.cat((h, torch.full((len(h), 1), GRIDS[format][-1])), -1).flatten()  # every group has the scale 1
    for scale in (1.0, 8.0, -(2.0**-20)) if format != "nvfp4" else (1.0, -1.0):
        assert_same(BILINEAR, h, torch.full_like(h, scale), None, format, group)


def almost_ties() -> Tensor:
    """Return tokens of quotients that are ties but for rounding: a product with the reciprocal often misses them."""
    scale = torch.linspace(0.01, 0.011, 64)[:, None]
    return torch.cat((scale * 127, scale * (torch.arange(63) + 0.5)), -1)


def test_the_quotient_is_a_true_division() -> None:
    h = almost_ties()
    for format in ("int8", "fp8_e4m3", "fp8_e5m2"):
        assert_same(BILINEAR, h, torch.ones_like(h), None, format, None)


@pytest.mark.parametrize(("format", "group"), CASES)
def test_nan_infinity_and_nothing_but_zeros(format: str, group: int | None) -> None:
    g, u, weight = operands(9, 45)
    u[0] = 0
    g[1] = -0.0
    g[2:6, 3] = torch.tensor([NAN, INF, -INF, 3e38])
    g[6, 40:] = torch.tensor([NAN, INF, -INF, 1.0, 1.0])
    g[7] *= 1e-36
    weight[8] = NAN
    assert_same(BILINEAR, g, u.abs(), weight, format, group)
    with narrow():
        assert_same(BILINEAR, g, u.abs(), weight, format, group)


@pytest.mark.parametrize("tensor_scale", [0.003, torch.tensor(0.003), torch.tensor([0.7], dtype=torch.bfloat16)])
def test_the_scale_of_a_tensor(tensor_scale: float | Tensor) -> None:
    g, u, weight = operands(5, 45)
    given: dict[str, Any] = {"format": "nvfp4", "weight": weight, "tensor_scale": tensor_scale}
    assert same(fused((g, u), BILINEAR, **given), act_quant((g, u), BILINEAR, impl="reference", **given))


@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    order=st.permutations(range(4)),
    steps=st.tuples(*(st.sampled_from([0, 1, 2]) for _ in range(8))),
    case=st.sampled_from(CASES),
)
def test_any_shape_and_strides(shape: list[int], order: list[int], steps: tuple[int, ...], case: Any) -> None:
    places = [i for i in order if i < len(shape)]

    def laid(steps: tuple[int, ...]) -> Tensor:
        store = torch.full([shape[i] * max(steps[i], 1) for i in places], NAN)
        view = store.permute(*(places.index(i) for i in range(len(shape))))
        view = view[tuple(slice(None, None, max(steps[i], 1)) for i in range(len(shape)))]
        view.copy_(torch.randn(shape))
        return view[tuple(slice(0, 1) if steps[i] == 0 else slice(None) for i in range(len(shape)))].expand(shape)

    g, u = laid(steps[:4]), laid(steps[4:])
    weight = laid(steps)[..., :1]
    kept = [t.clone() for t in (g, u, weight)]
    assert_same(BILINEAR, g, u, weight, *case)
    torch.testing.assert_close([g, u, weight], kept, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_layouts_and_a_weight_without_an_axis(layout: str) -> None:
    x, weight = torch.randn(2, 3, 90), torch.rand(2, 3, dtype=torch.float64)
    for format in FORMATS:
        given: dict[str, Any] = {"format": format, "layout": layout, "weight": weight.float()}
        assert same(fused(x, "bilinear", **given), act_quant(x, "bilinear", impl="reference", **given))


@pytest.mark.parametrize("format", FORMATS)
def test_all_outputs_are_written_and_nothing_beside_them(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g, u, weight = operands(5, 61)
    buffers = []

    def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffers.append(torch.full((math.prod(shape) * dtype.itemsize + 128,), 0xA5, dtype=torch.uint8))
        return buffers[-1][64:-64].view(dtype).view(shape)

    size = FORMATS[format].group_of(61, None)
    right = expected(BILINEAR, g, u, weight, format, None)
    monkeypatch.setattr(triton.torch, "empty", poisoned)
    found = Quantised(*triton.forward(BILINEAR, g, u, weight, FORMATS[format], size, 1.0))
    monkeypatch.undo()
    assert same(found, right)
    assert len(buffers) == 2
    for b in buffers:
        assert (torch.cat((b[:64], b[-64:])) == 0xA5).all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1), (3, 1, 1), (3, 5, 7)])
def test_parameters_that_are_tensors(shape: tuple[int, ...]) -> None:
    g, u, weight = operands(3, 5, 7)
    gate = GATES["situ"].bind(beta=(1 + torch.rand(shape)).requires_grad_(), linear_beta=2 + torch.rand(7))
    for format, group in (("int8", 4), ("mxfp8", None)):
        assert_same(gate, g, u, weight, format, group)


def test_parameters_may_be_called_what_they_like() -> None:
    names = ("scale", "group", "place", "unit", "weight", "peak", "codes", "tiles", "whole", "given_g")
    g, u, weight = operands(3, 7)
    for a, b in itertools.pairwise(names):
        left, right = (Scalar(n, f"{n}*x", ("-oo", "oo"), "here", {n: "> 0"}) for n in (a, b))
        gate = Gate("odd", left, right, "here").bind(**{a: 2.0, b: torch.tensor(3.0)})
        truth = 6 * g.double() * u.double() * weight.double()
        found = fused((g, u), gate, format="int8", weight=weight)
        assert error_violations(truth, found, "int8", None, slack=1e-6) == []


def test_nothing_to_do() -> None:
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 3)):
        g = torch.empty(shape)
        for format in FORMATS:
            found = fused((g, g), "swiglu", format=format)
            assert same(found, act_quant((g, g), "swiglu", format=format, impl="reference"))


def test_offsets_past_2_to_the_31() -> None:
    far = far_apart(2)
    for view, value in zip(far, operands(3, 5, dtype=torch.float16), strict=False):
        view.copy_(value)
    for g, u in (far, [v.T for v in far]):  # far rows, then far columns
        for format, group in CASES:
            assert_same(BILINEAR, g, u, None, format, group)


def test_what_runs() -> None:
    x = torch.randn(4, 20)
    given: dict[str, Any] = {"format": "int8", "layout": "gate_up"}
    assert resolve(x, "swiglu", **given) == "fast"
    assert resolve(x, "swiglu", impl="triton", **given) == "triton"
    assert not fused(x.requires_grad_(), "swiglu", **given).scale.requires_grad
    with pytest.raises(ConfigError, match=r'"triton" of act_quant computes in float32.*float64: write impl='):
        fused(x.double(), "swiglu", **given)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ConfigError, match="plain tensors, not FakeTensor"):
        fused(torch.empty(4, 20), "swiglu", **given)
    with pytest.raises(ConfigError, match=r'torch.func: write impl="auto"'):
        torch.func.vmap(lambda t: fused(t, "swiglu", **given).scale)(x)


@contextmanager
def mended(text: str, new: str) -> Iterator[None]:
    """Replace ``text`` in the kernel, which must have it."""
    build = triton.build

    def broken(source: str, name: str) -> Any:
        assert text in source
        return build(source.replace(text, new), name)

    triton._kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "build", broken)
        yield
    triton._kernel.cache_clear()


def _ordinary(format: str, group: int | None) -> None:
    assert_same(BILINEAR, *operands(5, 63), format, group)


def _twice(format: str, group: int | None) -> None:
    g, u, weight = operands(5, 63)
    g[:, 5] = 99.0
    with narrow():
        assert_same(BILINEAR, g, u, weight, format, group)


def _ties(format: str, group: int | None) -> None:
    h = almost_ties()
    assert_same(BILINEAR, h, torch.ones_like(h), None, format, group)


def _with_nan(format: str, group: int | None) -> None:
    g, u, weight = operands(5, 63)
    g[2, 7] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the NaN that a GPU makes
    assert_same(BILINEAR, g, u, weight, format, group)


@pytest.mark.parametrize(
    ("law", "format", "group", "text", "new"),
    [
        (_ordinary, "int8", None, "(quotient + 12582912.0)", "(tl.floor(quotient) + 12582912.0)"),
        (_ordinary, "fp8_e4m3", None, "(tl.abs(x) + large)", "(tl.abs(x)*0.99 + large)"),
        (_ordinary, "fp8_e5m2", None, "minifloat(quotient, 2, 113)", "minifloat(quotient, 2, 112)"),
        (_ordinary, "nvfp4", None, "low | (high << 4)", "high | (low << 4)"),
        (_ordinary, "mxfp8", None, "(peak >> 23) - 8", "(peak >> 23) - 7"),
        (_ordinary, "int8", None, "largest, 127.0", "largest, 128.0"),
        (_ordinary, "int8", 20, "*weight[:, None]", ""),
        (_ordinary, "int8", 20, " & (lane < group)", ""),
        (_ordinary, "int8", 20, "unit % GROUPS", "0*unit"),
        (_twice, "int8", None, "tl.maximum(peak, ", "tl.maximum(0, "),
        (_ties, "int8", None, "tl.div_rn(h, scale[:, None])", "h*tl.div_rn(1.0, scale[:, None])"),
        (_with_nan, "int8", None, "tl.where(quotient == quotient, quotient, 0.0)", "quotient"),
        (_with_nan, "mxfp8", None, "tl.where(largest == largest, exponent, 255)", "exponent"),
    ],
)
def test_broken_kernels_are_caught(
    law: Callable[[str, int | None], None], format: str, group: int | None, text: str, new: str
) -> None:
    law(format, group)
    with mended(text, new), pytest.raises(AssertionError, match=r"'bilinear', "):
        law(format, group)
