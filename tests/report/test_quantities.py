"""Numbers as texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.lab.results import Estimate, Ratio
from tensorformer.report import quantities as q


def plain(text: str) -> str:
    return text.replace(q.THIN, " ")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (q.scaled(842_112, "", 0.1), "0.842 M"),
        (q.scaled(5_112_832, "FLOP", 0.1), "5.11 MFLOP"),
        (q.scaled(14_213, " tokens/s"), "14.2 k tokens/s"),
        (q.scaled(913, ""), "913"),
        (q.scaled(0, ""), "0"),
        (q.size(213_000_000), "213 MB"),
        (q.size(1_240_000_000), "1.24 GB"),
        (q.size(31_000), "0.031 MB"),
        (q.duration(0.1443), "144 ms"),
        (q.duration(5400), "90.0 min"),
        (q.percent(-0.0012), "−0.12 %"),
        (q.signed(0.0042, 3), "+0.004"),
        (q.signed(-0.0042, 3), "−0.004"),
        (q.signed(-0.0001, 3), "0.000"),
        (q.number(float("inf"), 3), "diverged"),
        (q.number(-1234.5, 1), "−1,234.5"),
        (q.level(Estimate(1.70312, 1.68792, 1.71832, 3)), "1.703 ± 0.015"),
        (q.level(Estimate(1.70312, 1.70268, 1.70356, 3)), "1.7031 ± 0.0004"),
        (q.level(Estimate(1.70312, None, None, 1)), "1.7031"),
        (q.level(Estimate(1.70312, 1.70312, 1.70312, 3)), "1.7031 ± 0.0000"),
        (q.interval(Estimate(0.004, -0.012, 0.02, 3)), "−0.012 … +0.020"),
        (q.interval(Estimate(0.004, None, None, 1)), "—"),
        (q.ratio(Ratio(1.0612, 0.98, 1.15)), "1.06×"),
        (q.ratio_interval(Ratio(1.0612, 0.98, 1.15)), "0.98 … 1.15"),
        (q.ratio(Ratio(2.0, None, None, ">")), "> 2.00×"),
        (q.ratio(Ratio(0.5, 0.4, 0.6, "<")), "< 0.50×"),
        (q.ratio_interval(Ratio(0.5, 0.4, 0.6, "<")), ""),
        (q.ratio(None), "—"),
        (q.probability(0.031), "0.031"),
        (q.probability(1e-9), "< 0.0001"),
        (q.probability(0.0), "< 0.0001"),
        (q.probability(None), "—"),
        (q.learning_rate(0.002), "0.002"),
        (q.learning_rate(3e-5), "3.00e-05"),
    ],
)
def test_numbers_read_well(said: str, expected: str) -> None:
    assert plain(said) == expected


@given(mean=st.floats(-100, 100), half=st.floats(0, 10))
def test_an_interval_never_loses_its_digits(mean: float, half: float) -> None:
    estimate = Estimate(mean, mean - half, mean + half, 3)
    places = q.decimals(estimate)
    assert q.LEAST_DECIMALS <= places <= q.MOST_DECIMALS
    if half > 1e-4:
        assert q.number(half, places).strip("0.") != ""


@given(st.floats(-1e13, 1e13))
def test_every_number_has_three_digits_and_no_hyphen(value: float) -> None:
    text = q.scaled(value, "B")
    assert "-" not in text
    assert "e" not in text
