"""The distribution of numbers that come in batches: exact counts and moments, percentiles from a histogram.

The histogram has a bin for every value of float32's sign, exponent and first eight bits of mantissa: 131,072 bins,
1 MiB, whatever the data. A bin is at most 2⁻⁸ of its value wide and is read at its middle, so that any single value is
known to within 2⁻⁹, 0.2 % (or 10⁻⁴⁰ near zero); values beyond float32's range count as its largest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tensorformer.study.ranges_result import PERCENTS, Summary

CHUNK = 1 << 20  # values widened to float64 at a time
OUTLIER = 6.0  # times the rms
_DROPPED = 15  # bits of float32's mantissa that a bin leaves out
_HALF = 1 << (31 - _DROPPED)  # bins of each sign


class Moments(NamedTuple):
    """Count, mean, and sums of powers of deviations from it."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0

    @classmethod
    def of(cls, x: Float64[Tensor, " n"]) -> Moments:
        """Return the moments of some finite values."""
        if not len(x):
            return cls()
        mean = float(x.mean())
        d = x - mean
        squares = d * d
        m2, m3, m4 = torch.stack((squares.sum(), (squares * d).sum(), (squares * squares).sum())).tolist()
        return cls(len(x), mean, m2, m3, m4)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together (Pébay 2008, SAND2008-6212, equations 1.5, 2.1 and 2.2)."""
        if not self.n or not other.n:
            return self if self.n else other
        a, b = self.n, other.n
        n = a + b
        d = other.mean - self.mean
        m2 = self.m2 + other.m2 + d**2 * a * b / n
        m3 = self.m3 + other.m3 + d**3 * a * b * (a - b) / n**2 + 3 * d * (a * other.m2 - b * self.m2) / n
        m4 = self.m4 + other.m4 + d**4 * a * b * (a * a - a * b + b * b) / n**3
        m4 += 6 * d**2 * (a * a * other.m2 + b * b * self.m2) / n**2 + 4 * d * (a * other.m3 - b * self.m3) / n
        return Moments(n, self.mean + d * b / n, m2, m3, m4)


class Stream:
    """Summary of values handed in piece by piece; its memory does not depend on how many come."""

    def __init__(self) -> None:
        self._moments = Moments()
        self._nan = self._inf = self._zeros = self._negative = 0
        self._min, self._max = math.inf, -math.inf
        self._histogram = torch.zeros(2 * _HALF, dtype=torch.int64)

    def update(self, x: Float[Tensor, "*shape"]) -> None:
        """Count the values of ``x``: any shape, stride and floating dtype, on any device."""
        for chunk in x.detach().reshape(-1).split(CHUNK):
            self._add(chunk.double())

    def _add(self, x: Float64[Tensor, " n"]) -> None:
        finite = x.isfinite()
        if not finite.all():
            nan = int(x.isnan().sum())
            self._nan += nan
            self._inf += len(x) - nan - int(finite.sum())
            x = x[finite]
        if not len(x):
            return
        self._moments = self._moments.merge(Moments.of(x))
        self._zeros += int((x == 0).sum())
        self._negative += int((x < 0).sum())
        low, high = x.aminmax()
        self._min, self._max = min(self._min, float(low)), max(self._max, float(high))
        self._histogram += torch.bincount(_bins(x), minlength=2 * _HALF).cpu()

    def summary(self) -> Summary:
        """Return what is known by now."""
        n, mean, m2, _, m4 = self._moments
        if not n:
            return Summary(0, self._nan, self._inf, None, None, None, None, {}, None, 0.0, 0.0, 0.0)
        counts = self._histogram.numpy()
        bins = np.flatnonzero(counts)
        counts, values = counts[bins], np.clip(_middles(bins), self._min, self._max)
        rms = math.sqrt(mean * mean + m2 / n)
        spread = self._min < self._max and 0 < m2 < math.inf  # equal values leave nothing but rounding in m2
        return Summary(
            count=n,
            nan=self._nan,
            inf=self._inf,
            min=self._min,
            max=self._max,
            mean=min(max(mean, self._min), self._max),
            rms=rms,
            percentiles={f"{p:g}": _percentile(values, counts, p) for p in PERCENTS},
            kurtosis=n * m4 / (m2 * m2) if spread and math.isfinite(m4) and m2 * m2 > 0 else None,
            outliers=float(counts[np.abs(values) > OUTLIER * rms].sum() / n),
            zeros=self._zeros / n,
            negative=self._negative / n,
        )


def _bins(x: Float64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Return each value's bin; bins are in the order of the values."""
    largest = torch.finfo(torch.float32).max
    bits = (x.clamp(-largest, largest).float() + 0.0).view(torch.int32)  # + 0.0: −0 is 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered >> _DROPPED).long() + _HALF


def _middles(bins: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    first = (bins - _HALF) << _DROPPED
    ends = np.stack((first, first + (1 << _DROPPED) - 1)).astype(np.int32)
    floats = np.where(ends < 0, ends ^ 0x7FFFFFFF, ends).astype(np.int32).view(np.float32).astype(np.float64)
    return np.where(first == 0, 0.0, floats.mean(0))  # the bin of zero holds nothing else above 1e-40


def _percentile(values: Float64[np.ndarray, " bins"], counts: Int64[np.ndarray, " bins"], percent: float) -> float:
    up_to = np.cumsum(counts)
    position = percent / 100 * (int(up_to[-1]) - 1)
    below, above = values[np.searchsorted(up_to, [math.floor(position), math.ceil(position)], side="right")]
    return float(below + (position - math.floor(position)) * (above - below))
