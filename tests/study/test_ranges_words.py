"""The sentence about caps says what the figures say: other figures, another sentence."""

from __future__ import annotations

import dataclasses

import pytest

from tensorformer.study.ranges_result import Effect, Product, Saturation, Summary
from tensorformer.study.ranges_words import findings, number, percent


def product(
    gate: str, amax: float, snrs: dict[str, float | None], bound: float | None = None, **more: float
) -> Product:
    summary = Summary(
        100, 0, 0, -amax, amax, 0.0, 1.0, {}, more.get("kurtosis", 9.0), more.get("outliers", 0.02), 0, 0.5
    )
    shares = {"phi low": (0.0, 0.3), "phi high": (4.0, more.get("at_caps", 0.01))}
    shares |= {"psi low": (-9.0, 0.1), "psi high": (9.0, 0.2)}
    saturation = {key: Saturation(limit, 3 * limit, share) for key, (limit, share) in shares.items()}
    effects = [Effect(f, None, 1.0, snr, more.get("error", 1.0), 0.1, 8, 0) for f, snr in snrs.items()]
    return Product(gate, bound, summary, saturation, more.get("output", 10.0), effects)


FREE = product("swiglu", 2000, {"int8": 20.0, "mxfp8": 30.0, "nvfp4": 15.0}, kurtosis=500.0, outliers=0.001)
CAPPED = product(
    "situ", 99.0, {"int8": 26.0, "mxfp8": 30.4, "nvfp4": 13.0}, 100.0, kurtosis=20.0, error=0.25, output=5.0
)


def only(*sites: list[Product]) -> str:
    (sentence,) = findings(list(sites), "here")
    return sentence


def test_every_part_is_a_figure() -> None:
    assert only([FREE, CAPPED]).split("; ") == [
        "here: situ bounds |h| by 100 and reached 99.0 where swiglu reached 2,000",
        "signal-to-noise of a token: buys int8 6.0 dB, costs nvfp4 2.0 dB, changes mxfp8 by less than 1 dB",
        "its error is 0.25 times swiglu's, its output 0.50 times",
        "outliers 0.1 % → 2 %, kurtosis 500 → 20.0",
        "1 % of g and 30 % of u lie at its caps",
    ]


def test_flipped_figures_flip_the_sentence() -> None:
    flipped = only(
        [
            dataclasses.replace(FREE, effects=CAPPED.effects, product=CAPPED.product, output=5.0),
            dataclasses.replace(CAPPED, effects=FREE.effects, product=FREE.product, output=10.0),
        ]
    )
    assert "buys nvfp4 2.0 dB, costs int8 6.0 dB" in flipped
    assert "its error is 4.00 times swiglu's, its output 2.00 times" in flipped
    assert "swiglu stayed within that bound by itself, at 99.0" in flipped
    assert "outliers 2 % → 0.1 %, kurtosis 20.0 → 500" in flipped


def test_nothing_bought_is_said_to_be_nothing() -> None:
    same = dataclasses.replace(CAPPED, effects=FREE.effects)
    assert "changes int8, mxfp8, nvfp4 by less than 1 dB" in only([FREE, same])
    assert "buys" not in only([FREE, same])


def test_several_layers_count_by_their_median() -> None:
    sites = [
        [FREE, dataclasses.replace(CAPPED, effects=product("", 1, {"int8": snr, "mxfp8": 30, "nvfp4": 15}).effects)]
        for snr in (20.0, 23.0, 90.0)
    ]
    assert "buys int8 3.0 dB" in only(*sites)


def test_formats_without_a_figure_are_left_out() -> None:
    exact = product("situ", 1, {"int8": None, "mxfp8": 33.0, "nvfp4": None}, 100.0)
    assert "signal-to-noise of a token: buys mxfp8 3.0 dB;" in only([FREE, exact])
    nothing = product("situ", 1, {"int8": None, "mxfp8": None, "nvfp4": None}, 100.0)
    assert "signal-to-noise of a token: unknown;" in only([FREE, nothing])


def test_it_needs_one_gate_with_caps_and_one_without() -> None:
    assert findings([[FREE]], "here") == []
    assert findings([[CAPPED]], "here") == [
        "here: every gate measured is capped, and none without caps shows what that buys"
    ]
    bilinear = dataclasses.replace(FREE, gate="bilinear")
    assert "where bilinear reached" in only([bilinear, CAPPED])
    assert "where swiglu reached" in only([bilinear, CAPPED, FREE])


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0, "0.000"),
        (0.5, "0.500"),
        (-1.234, "-1.23"),
        (99.995, "100"),
        (12.34, "12.3"),
        (-9999.0, "-1.0e4"),
        (-1234.5, "-1,230"),
        (1e-5, "1.0e-5"),
        (-3.21e12, "-3.2e12"),
    ],
)
def test_numbers_are_short(x: float, text: str) -> None:
    assert number(x) == text
    assert len(text) <= 7


def test_shares() -> None:
    assert [percent(s) for s in (0, 0.5, 0.012, 0.00046)] == ["0 %", "50 %", "1.2 %", "0.046 %"]
