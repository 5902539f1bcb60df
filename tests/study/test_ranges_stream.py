"""Summaries of a stream: numpy and scipy, which see the whole array at once, are the oracle."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from torch import Tensor

from tensorformer.study import ranges_stream
from tensorformer.study.ranges_result import PERCENTS, Summary
from tensorformer.study.ranges_stream import Moments, Stream

HALF_BIN = 2.0**-9
NAN, INF = math.nan, math.inf


def summary(*pieces: Tensor) -> Summary:
    stream = Stream()
    for piece in pieces:
        stream.update(piece)
    return stream.summary()


def check(pieces: list[Tensor]) -> None:
    """Fail unless the summary of the pieces is that of all their finite values together."""
    got = summary(*pieces)
    x = torch.cat([p.flatten().double() for p in pieces]).numpy()
    finite = x[np.isfinite(x)]
    assert (got.count, got.nan, got.inf) == (len(finite), np.isnan(x).sum(), np.isinf(x).sum())
    if not len(finite):
        assert got.min is got.max is got.mean is got.rms is got.kurtosis is None
        return
    assert (got.min, got.max) == (finite.min(), finite.max())
    size = np.abs(finite).max()
    rms = np.sqrt(np.mean(finite**2))
    assert got.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-13 * size)
    assert got.rms == pytest.approx(rms, rel=1e-12)
    assert got.zeros == (finite == 0).mean()
    assert got.negative == (finite < 0).mean()
    for p in PERCENTS:
        below, above = (np.percentile(finite, p, method=m) for m in ("lower", "higher"))
        bound = HALF_BIN * max(abs(below), abs(above)) * (1 + 1e-6) + 1e-40
        assert got.percentiles[f"{p:g}"] == pytest.approx(np.percentile(finite, p), abs=bound)
    if finite.min() == finite.max():
        assert got.kurtosis is None
    elif finite.std() > 1e-6 * size:
        assert got.kurtosis == pytest.approx(scipy.stats.kurtosis(finite, fisher=False), rel=1e-7)
    shares = [(np.abs(finite) > f * 6 * rms).mean() for f in (1 + 2 * HALF_BIN, 1 - 2 * HALF_BIN)]
    assert shares[0] <= got.outliers <= shares[1]


finite_floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)
floats = finite_floats | st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e-45, 3.4e38, -3.4e38])


@given(st.lists(st.lists(floats, max_size=40), min_size=1, max_size=5), st.integers(1, 17))
def test_any_values_in_any_pieces(pieces: list[list[float]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_stream, "CHUNK", chunk)
        check([torch.tensor(p, dtype=torch.float32) for p in pieces])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 3, 7, 63, 257, 1368])
def test_distributions_with_tails_and_an_offset(dtype: torch.dtype, n: int) -> None:
    normal, heavy = torch.randn(n), torch.randn(n) / torch.randn(3, n).square().mean(0).sqrt()
    check([normal.to(dtype), (3 * heavy + 2).to(dtype), torch.rand(2, n).to(dtype) - 5])


def test_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_stream, "CHUNK", 1 << 14)
    check([torch.randn(300, 401), 1e3 + torch.randn(90_000)])


def test_one_value_and_equal_values_are_exact_and_have_no_kurtosis() -> None:
    for x in (torch.tensor([0.1]), torch.full((1001,), 0.1), torch.full((50,), -3e38)):
        got = summary(x, x[:1])
        value = float(x[0].double())
        assert got.min == got.max == got.mean == value
        assert set(got.percentiles.values()) == {value}
        assert got.kurtosis is None
        assert got.outliers == 0


def test_nan_and_infinities_are_counted_and_do_not_spread() -> None:
    x = torch.randn(100)
    clean = summary(x)
    dirty = summary(torch.cat((x, torch.tensor([NAN, INF, -INF, INF]))))
    assert (dirty.nan, dirty.inf) == (1, 3)
    assert dirty.percentiles == clean.percentiles
    assert dirty.kurtosis == pytest.approx(clean.kurtosis)
    assert summary(torch.tensor([NAN, INF])).percentiles == {}


def test_nothing_at_all() -> None:
    got = summary(torch.empty(0, 5))
    assert (got.count, got.nan, got.inf, got.min, got.amax) == (0, 0, 0, None, 0.0)


def test_any_stride_and_no_gradient() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    assert summary(x.t()[::2]) == summary(x.detach().t()[::2].contiguous())
    assert summary(x[:1].expand(9, 8)).count == 72
    assert x.grad is None


def test_outliers_are_found() -> None:
    x = torch.ones(10_000)
    x[:5] = torch.tensor([100.0, -100, 50, 7, 6.9])
    rms = x.double().square().mean().sqrt()
    assert rms == pytest.approx(1.85, abs=0.05)
    assert summary(x).outliers == pytest.approx(3 / 10_000)


def test_its_memory_does_not_grow() -> None:
    stream = Stream()
    stream.update(torch.randn(10))
    before = {k: v.numel() if isinstance(v, Tensor) else 1 for k, v in vars(stream).items()}
    for _ in range(20):
        stream.update(torch.randn(5000))
    assert {k: v.numel() if isinstance(v, Tensor) else 1 for k, v in vars(stream).items()} == before


def _forgets_the_distance_of_the_means(self: Moments, other: Moments) -> Moments:
    n = self.n + other.n
    mean = (self.n * self.mean + other.n * other.mean) / n
    return Moments(n, mean, self.m2 + other.m2, self.m3 + other.m3, self.m4 + other.m4)


def _forgets_the_third_moments(self: Moments, other: Moments) -> Moments:
    return RIGHT(self._replace(m3=0.0), other._replace(m3=0.0))


def _averages_the_means(self: Moments, other: Moments) -> Moments:
    return RIGHT(self, other)._replace(mean=(self.mean + other.mean) / 2)


def _keeps_the_last(self: Moments, other: Moments) -> Moments:
    return other


RIGHT = Moments.merge
BROKEN = [_forgets_the_distance_of_the_means, _forgets_the_third_moments, _averages_the_means, _keeps_the_last]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_merge_is_caught(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moments, "merge", broken)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check([torch.randn(50).exp(), torch.randn(70).exp() - 3, torch.rand(9)])


def test_coarser_bins_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_stream, "_bins", lambda x: BINS(x) // 8 * 8)
    with pytest.raises(AssertionError):
        check([torch.randn(1000)])


BINS = ranges_stream._bins
