"""What `study numerics` says about approximation, the dtype inside, the place of rounding, tails and limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.gates import GATES, SCALARS, activation
from tensorformer.gates.examples import example
from tensorformer.study.numerics import DTYPES, numerics
from tensorformer.study.numerics_inputs import along, points
from tensorformer.study.numerics_report import Report

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def study(function: Callable[..., Any], declared: str, **parameters: float) -> Report:
    return numerics(function, activation(declared, **parameters), dtypes=DTYPES)


@pytest.mark.parametrize("name", [*SCALARS, *GATES])
def test_ours_has_nothing_but_rounding(name: str) -> None:
    form = example(GATES[name]) if name in GATES else example(SCALARS[name])
    report = numerics(form, form, dtypes=DTYPES)
    assert report.verdict.startswith("right: nothing but rounding; bfloat16 is rounded")
    assert report.approximation is not None
    assert report.approximation.beyond == 0
    assert [r.intermediate for r in report.rounding] == ["float32"] * 3
    assert all(f.place is not None for f in report.fusion)
    assert all(e.agrees for e in (*report.tails, *report.limits))


def test_torch_gelu_is_right_and_loses_its_tail() -> None:
    report = study(F.gelu, "gelu")
    assert report.definition.fits
    assert report.approximation is not None
    assert report.approximation.beyond > 1e6
    assert report.approximation.relative == pytest.approx(1)
    assert report.approximation.absolute < 1e-6
    got = {e.at[0]: e.got / e.truth for e in report.tails if e.truth}
    assert got[-5.0] == pytest.approx(0.83, abs=0.01)
    assert got[-6.0] == 0
    assert "17 % off at x = -5" in report.verdict
    assert "0 for -5.92e-09 at x = -6" in report.verdict
    assert {e.at[0]: e.agrees for e in report.limits if math.isinf(e.at[0])} == {-math.inf: False, math.inf: False}
    # An approximation is no rounding: the low dtypes are held to what float32 gives.
    assert report.rounding[1].intermediate == "float32"
    assert report.fusion[0].place == "once, at the end"


def test_torch_silu_is_right_but_for_minus_infinity() -> None:
    report = study(F.silu, "silu")
    assert report.verdict == (
        "right: nothing but rounding; bfloat16 is rounded once, at the end; but nan for 0 at x = -inf"
    )


def test_a_coarse_exponential_is_an_approximation() -> None:
    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x) * (1 + 4e-6 * torch.sin(40 * x)))

    report = study(silu, "silu")
    assert report.definition.fits
    assert report.approximation is not None
    assert 20 < report.approximation.beyond < 100
    assert report.verdict.startswith("right definition, approximated in float32: ")
    assert report.rounding[0].intermediate == "float32"


def stepwise(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def cut(x: Tensor) -> Tensor:
    y = F.silu(x.float())
    return y if x.dtype == F32 else (y.view(torch.int32) & ~0xFFFF).view(F32).to(x.dtype)


PLACES: list[tuple[str, Callable[..., Any], str, torch.dtype, str]] = [
    ("swiglu", lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype), "once, at the end", BF16, "float32"),
    ("swiglu", lambda g, u: F.silu(g) * u, "after φ and at the end", BF16, "float32"),
    ("swiglu", lambda g, u: g * torch.sigmoid(g) * u, "after every operation, in bfloat16", BF16, "bfloat16"),
    ("swiglu", lambda g, u: g * torch.sigmoid(g) * u, "after every operation, in float16", FP16, "float16"),
    (
        "swiglu",
        lambda g, u: F.silu(g.half()).to(g.dtype) * u,
        "φ in float16, then after φ and at the end",
        BF16,
        "float16",
    ),
    (
        "swiglu",
        lambda g, u: (F.silu(g.half()).float() * u.float()).to(g.dtype),
        "φ in float16, then at the end",
        BF16,
        "float16",
    ),
    (
        "gtu",
        lambda g, u: (torch.sigmoid(g) * torch.tanh(u.float())).to(g.dtype),
        "after φ and at the end",
        BF16,
        "float32",
    ),
    (
        "gtu",
        lambda g, u: (torch.sigmoid(g.float()) * torch.tanh(u)).to(g.dtype),
        "after ψ and at the end",
        BF16,
        "float32",
    ),
    ("gtu", lambda g, u: torch.sigmoid(g) * torch.tanh(u), "after φ, after ψ and at the end", BF16, "float32"),
    ("geglu_tanh", lambda g, u: F.gelu(g, approximate="tanh") * u, "after φ and at the end", BF16, "float32"),
    ("silu", F.silu, "once, at the end", FP16, "float32"),
    ("silu", cut, "once, at the end, by cutting digits off", BF16, "float32"),
    ("silu", lambda x: F.silu(x.half()).to(x.dtype), "once in float16, then at the end", BF16, "float16"),
    ("gelu_quick", stepwise, "after every operation, in bfloat16", BF16, "bfloat16"),
    ("gelu_quick", lambda x: stepwise(x.half()).to(x.dtype), "after every operation, in float16", BF16, "float16"),
]


@pytest.mark.parametrize(
    ("name", "function", "place", "dtype", "inside"), PLACES, ids=[f"{p[0]}, {p[2]}, {p[3]}" for p in PLACES]
)
def test_where_it_rounds_is_found(
    name: str, function: Callable[..., Any], place: str, dtype: torch.dtype, inside: str
) -> None:
    report = numerics(function, activation(name), dtypes=[F32, dtype])
    assert report.definition.fits
    (fusion,) = report.fusion
    assert fusion.place == place
    assert fusion.shares[place] > 0.995
    assert sorted(fusion.shares.values())[-2] < 0.99
    assert report.rounding[1].intermediate == inside
    assert ("bfloat16 is cut off, not rounded" in report.verdict) == (function is cut)


@pytest.mark.parametrize("coarse", [FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", lambda x, d: F.silu(x.to(d)).to(x.dtype)),
        ("silu", lambda x, d: x * torch.sigmoid(x).to(d).to(x.dtype)),
        ("silu", lambda x, d: F.silu(x).to(d).to(x.dtype)),
        ("swiglu", lambda g, u, d: F.silu(g.to(d)).to(g.dtype) * u),
        ("swiglu", lambda g, u, d: F.silu(g) * u.to(d).to(u.dtype)),
        ("swiglu", lambda g, u, d: (F.silu(g) * u).to(d).to(u.dtype)),
        ("gelu", lambda x, d: F.gelu(x.to(d)).to(x.dtype)),
    ],
)
def test_coarse_arithmetic_inside_is_named(name: str, function: Callable[..., Any], coarse: torch.dtype) -> None:
    report = numerics(lambda *x: function(*x, coarse), name, dtypes=[F32])
    word = str(coarse).removeprefix("torch.")
    assert report.definition.fits
    assert report.rounding[0].intermediate == word
    assert report.verdict.startswith(f"right definition, coarse arithmetic: arithmetic in {word}")


def test_arithmetic_in_float32_is_not_called_coarse() -> None:
    """In float64 as well: many kernels compute in float32 whatever they get."""
    report = study(lambda x: F.silu(x.float()).to(x.dtype), "silu")
    assert report.verdict.startswith("right: ")
    assert report.rounding[0].intermediate == "float32"


def test_a_wrong_definition_does_not_hide_the_rest() -> None:
    report = study(lambda g, u: F.silu(u) * g, "swiglu")
    assert report.definition.mistake == "gate and up are swapped"
    assert report.fusion[0].place == "after φ and at the end"
    assert report.approximation is not None
    assert report.approximation.beyond == 0


def test_what_fits_no_formula_is_not_judged_further() -> None:
    report = study(lambda x: torch.sin(3 * x), "silu")
    assert report.approximation is None
    assert (report.rounding, report.fusion, report.tails, report.limits) == ((), (), (), ())


def test_a_dtype_it_refuses_is_left_out() -> None:
    def only_float32(x: Tensor) -> Tensor:
        assert x.dtype == F32
        return F.silu(x)

    report = study(only_float32, "silu")
    assert report.definition.precision == "float32"
    assert report.definition.fits
    assert [r.dtype for r in report.rounding] == ["float32"]
    assert report.fusion == ()


def test_infinities_and_nan_are_looked_at() -> None:
    report = study(lambda x: F.silu(x).nan_to_num(nan=0.0), "silu")
    assert [e.at[0] for e in report.limits if not e.agrees and not math.isnan(e.at[0])] == []
    assert any(math.isnan(e.at[0]) and not e.agrees for e in report.limits)


def test_inputs_are_the_same_every_time_and_reach_past_every_clamp() -> None:
    for n in (1, 2):
        for x in points(n):
            assert x.dtype == torch.float64
            assert x.shape[1] == 33
            assert x.min() < -25
            assert x.max() > 25
            assert x.abs().min() < 1e-2
        assert all(torch.equal(a, b) for a, b in zip(points(n), points.__wrapped__(n), strict=True))
    g, u = points(2)
    assert abs(torch.corrcoef(torch.stack((g.flatten(), u.flatten())))[0, 1]) < 0.15
    assert along((1.0, 2.0), 2)[0].tolist() == [[1.0, 2.0, 1.5, 1.5]]
