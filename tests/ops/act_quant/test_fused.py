"""The fused operator: φ(g)·ψ(u)·weight against float64, tiles against the whole, what it keeps in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorformer.gates import GATES, Gate
from tensorformer.ops.act_quant import FORMATS, Quantised, act_quant, dequantise, fast, quantise, resolve
from tests.gates.gate_laws import GATE_NAMES, gate
from tests.ops.act_quant.quant_laws import CASES, SIZES, error_violations, fused_violations, same

EXACT = ("bilinear", "reglu")  # no exp: the same to the bit wherever a vector loop ends


def joined(g: Tensor, u: Tensor, layout: str) -> Tensor:
    """Return the one tensor that holds ``g`` and ``u`` in this layout."""
    if layout == "interleaved":
        return torch.stack((g, u), -1).flatten(-2)
    return torch.cat((g, u) if layout == "gate_up" else (u, g), -1)


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize(("format", "group"), CASES)
def test_the_codes_are_those_of_the_product(format: str, group: int | None, impl: str, small_tiles: None) -> None:
    def fused(*args: Any, **kwargs: Any) -> Quantised:
        return act_quant(*args, **kwargs, impl=impl)

    for name in ("swiglu", "situ", "swiglu_oai"):
        assert fused_violations(fused, gate(name), format, group) == []


@pytest.mark.parametrize("name", GATE_NAMES)
def test_every_gate(name: str, small_tiles: None) -> None:
    for format in ("int8", "nvfp4"):
        assert fused_violations(act_quant, gate(name), format, None) == []


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TILE", 130)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved", None])
@pytest.mark.parametrize("width", SIZES)
def test_tiles_are_the_whole_to_the_bit(width: int, layout: str | None, dtype: torch.dtype, small_tiles: None) -> None:
    g, u = torch.randn(2, 3, 5, width).to(dtype)
    x = joined(g, u, layout) if layout else (g, u)
    weight = torch.rand(3, 5, 1).to(dtype)
    for i, (format, group) in enumerate(CASES):
        kwargs: dict[str, Any] = {"format": format, "group": group, "layout": layout, "weight": weight}
        name = EXACT[i % 2]
        tiled = act_quant(x, name, impl="fast", **kwargs)
        assert same(tiled, act_quant(x, name, impl="reference", **kwargs))
        # And both are the cast of the product itself, in float32 or better.
        wide = torch.promote_types(dtype, torch.float32)
        assert same(tiled, quantise(GATES[name](g.to(wide), u.to(wide)) * weight.to(wide), format, group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["gate_up", None])
def test_tiles_of_their_own_size_are_the_whole_to_the_bit(layout: str | None, dtype: torch.dtype) -> None:
    g, u = torch.randn(2, 300, 1368).to(dtype)
    x = joined(g, u, layout) if layout else (g, u)
    for name in ("swiglu", "situ"):
        whole = act_quant(x, gate(name), format="int8", layout=layout, impl="reference")
        assert same(act_quant(x, gate(name), format="int8", layout=layout), whole)


def test_strides(small_tiles: None) -> None:
    store = torch.randn(40, 3, 6, 7)
    pairs = [
        (store[:20].permute(1, 3, 2, 0), store[20:].permute(1, 3, 2, 0)),
        (store[::2, :, 1], store[1::2, :, 2]),
        (store[:1, :, :1].expand(20, 3, 6, 7), store[20:]),
        (store[:20, ..., :1].expand(20, 3, 6, 9), store[20:, ..., 1:2].expand(20, 3, 6, 9)),
    ]
    for g, u in pairs:
        expected = quantise(g.contiguous() * u.contiguous(), "int8")
        assert same(act_quant((g, u), "bilinear", format="int8"), expected)
        assert same(act_quant((g, u), "bilinear", format="int8", impl="reference"), expected)


def test_nothing_is_read_past_the_end(small_tiles: None) -> None:
    store = torch.full((11, 90), math.nan)
    x = store[1:10, 3:77]
    x.copy_(torch.randn(9, 74))
    for format in FORMATS:
        result = act_quant(x, "swiglu", format=format, layout="gate_up")
        assert dequantise(*result, format, width=37).isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_inputs_stay_as_they_are(format: str, small_tiles: None) -> None:
    x, weight = torch.randn(8, 64), torch.rand(8)
    before = x.clone(), weight.clone()
    for name in ("bilinear", "swiglu"):
        act_quant(x, name, format=format, layout="gate_up", weight=weight)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_a_bad_token_disturbs_no_other(small_tiles: None) -> None:
    x = torch.randn(9, 64)
    for format in FORMATS:
        clean = act_quant(x, "swiglu", format=format, layout="gate_up")
        for bad in (math.nan, math.inf, -math.inf):
            y = x.clone()
            y[4, 40] = bad
            result = act_quant(y, "swiglu", format=format, layout="gate_up")
            others = [0, 1, 2, 3, 5, 6, 7, 8]
            assert same(Quantised(*(t[others] for t in result)), Quantised(*(t[others] for t in clean)))
            if math.isnan(bad):
                assert dequantise(*result, format)[4, 8].isnan()


def test_a_weight_is_one_number_a_token_and_part_of_what_is_cast() -> None:
    x, weight = torch.randn(4, 3, 50), torch.rand(4, 3)
    for format in FORMATS:
        flat = act_quant(x, "swiglu", format=format, layout="gate_up", weight=weight)
        assert same(flat, act_quant(x, "swiglu", format=format, layout="gate_up", weight=weight[..., None]))
    one = act_quant(x[0, 0], "swiglu", format="int8", layout="gate_up", weight=weight[0, 0])
    assert same(one, act_quant(x[0, :1], "swiglu", format="int8", layout="gate_up", weight=weight[0, :1])._replace(
        codes=one.codes, scale=one.scale))  # fmt: skip
    assert one.codes.shape == (25,)


@pytest.mark.parametrize("shape", [(), (30,), (7, 1), (1, 30), (2, 7, 30)])
def test_parameters_that_are_tensors(shape: tuple[int, ...], small_tiles: None) -> None:
    x = torch.randn(2, 7, 60)
    beta = torch.rand(shape) + 0.5
    situ = GATES["situ"].bind(beta=beta, linear_beta=25.0)
    truth = GATES["situ"].bind(beta=beta.double(), linear_beta=25.0)(*x.double().chunk(2, -1))
    for impl in ("fast", "reference"):
        result = act_quant(x, situ, format="int8", layout="gate_up", impl=impl)
        assert error_violations(truth, result, "int8", None, slack=2e-6) == []


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest new tensor, in bytes: one that shares no storage with what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return result


def test_the_product_is_never_in_memory_as_a_whole() -> None:
    x = torch.randn(600, 2 * 1368)
    for format in FORMATS:
        with _Largest() as seen:
            act_quant(x, "swiglu", format=format, layout="gate_up", weight=torch.rand(600))
        assert seen.bytes <= 4 * fast.TILE
    with _Largest() as seen:
        act_quant(x, "swiglu", format="int8", layout="gate_up", impl="reference")
    assert seen.bytes >= 600 * 1368 * 4


def test_no_gradient_comes_out() -> None:
    x = torch.randn(4, 20, requires_grad=True)
    for impl in ("reference", "fast"):
        codes, scale = act_quant(x, "swiglu", format="fp8_e4m3", layout="gate_up", impl=impl)
        assert not codes.requires_grad
        assert not scale.requires_grad


def test_autocast_changes_nothing() -> None:
    x = torch.randn(4, 20)
    expected = act_quant(x, "swiglu", format="int8", layout="gate_up")
    with torch.autocast("cpu", torch.bfloat16):
        assert same(act_quant(x, "swiglu", format="int8", layout="gate_up"), expected)


def test_resolve_says_what_runs() -> None:
    x = torch.randn(4, 20)
    for impl, runs in (("auto", "fast"), ("fast", "fast"), ("reference", "reference")):
        assert resolve(x, "swiglu", format="int8", layout="gate_up", impl=impl) == runs
    assert resolve(x.to("meta"), "swiglu", format="int8", layout="gate_up") == "reference"


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0,), (2,), (2, 0, 4)])
def test_empty_and_small_shapes(shape: tuple[int, ...]) -> None:
    for format in FORMATS:
        codes, scale = act_quant(torch.ones(shape), "swiglu", format=format, layout="gate_up")
        assert dequantise(codes, scale, format, width=shape[-1] // 2).shape == (*shape[:-1], shape[-1] // 2)


def _swapped(x: Tensor, gate: Gate, *, layout: str, **kwargs: Any) -> Quantised:
    return act_quant(x, gate, layout="up_gate", **kwargs)


def _weight_after(x: Tensor, gate: Gate, *, weight: Tensor, **kwargs: Any) -> Quantised:
    """Into the scales, where they have room for it: right for a float32 scale, wrong for the others."""
    codes, scale = act_quant(x, gate, **kwargs)
    return Quantised(codes, (scale.float() * weight[:, None]).to(scale.dtype))


def _weight_dropped(x: Tensor, gate: Gate, *, weight: Tensor, **kwargs: Any) -> Quantised:
    return act_quant(x, gate, **kwargs)


def _half_precision(x: Tensor, gate: Gate, *, weight: Tensor, format: str, group: int | None, **_: Any) -> Quantised:
    g, u = x.half().chunk(2, -1)
    return quantise(gate(g, u) * weight.half()[:, None], format, group)


def _tanh_for_exact(x: Tensor, gate: Gate, **kwargs: Any) -> Quantised:
    return act_quant(x, "geglu_tanh", **kwargs)


@pytest.mark.parametrize(
    ("broken", "name", "format"),
    [
        (_swapped, "swiglu", "int8"),
        (_weight_after, "swiglu", "mxfp8"),
        (_weight_after, "swiglu", "nvfp4"),
        (_weight_dropped, "swiglu", "int8"),
        (_half_precision, "swiglu", "int8"),
        (_tanh_for_exact, "geglu", "int8"),
    ],
)
def test_a_broken_operator_is_caught(broken: Any, name: str, format: str) -> None:
    assert fused_violations(act_quant, gate(name), format, None) == []
    assert fused_violations(broken, gate(name), format, None) != []
