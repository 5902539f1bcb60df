"""What is said of a matrix of weights, against closed forms and laws; and broken statistics, each caught."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.study import routing_statistics as s

Statistics = Callable[[Tensor, Tensor], dict[str, Tensor]]
SIZES = (1, 3, 7, 63, 257)


def causal(t: int, seed: int, heads: int = 2) -> Tensor:
    """Return signed weights, none of them zero below the diagonal."""
    return torch.randn(heads, t, t, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tril()


def keys(t: int) -> Tensor:
    return torch.arange(1, t + 1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def laws(statistics: Statistics) -> None:
    """Check statistics against what they must be where that is known."""
    t = 7
    even = torch.ones(1, t, t, dtype=torch.float64).tril()
    found = statistics(even * 0.3, keys(t))
    n = keys(t).double().unsqueeze(0)
    close(found["row_sum"], 0.3 * n)
    close(found["row_mass"], 0.3 * n)
    close(found["entropy"], n.log())
    close(found["effective_keys"], n)
    close(found["top_share"], 1 / n)
    close(found["evenness"][:, 1:], torch.ones(1, t - 1, dtype=torch.float64))
    close(found["negative_share"], torch.zeros(1, t, dtype=torch.float64))

    one = torch.eye(t, dtype=torch.float64).unsqueeze(0) * -5
    found = statistics(one, keys(t))
    close(found["row_sum"], torch.full((1, t), -5.0, dtype=torch.float64))
    close(found["row_mass"], torch.full((1, t), 5.0, dtype=torch.float64))
    close(found["entropy"], torch.zeros(1, t, dtype=torch.float64))
    close(found["effective_keys"], torch.ones(1, t, dtype=torch.float64))
    close(found["negative_share"], torch.ones(1, t, dtype=torch.float64))

    mixed = torch.tensor([[[3.0, -1.0, 0.5, -0.5]]], dtype=torch.float64)
    found = statistics(mixed, torch.tensor([4]))
    assert found["row_sum"].item() == 2.0
    assert found["row_mass"].item() == 5.0
    assert found["negative_share"].item() == pytest.approx(0.3, abs=1e-15)
    assert found["top_share"].item() == pytest.approx(0.6, abs=1e-15)
    expected = -(0.6 * math.log(0.6) + 0.2 * math.log(0.2) + 0.2 * math.log(0.1))
    assert found["entropy"].item() == pytest.approx(expected, abs=1e-14)
    assert found["effective_keys"].item() == pytest.approx(math.exp(expected), abs=1e-13)
    assert found["evenness"].item() == pytest.approx(expected / math.log(4), abs=1e-14)


def test_closed_forms() -> None:
    laws(s.row_statistics)


def _with(**changed: Callable[[Tensor, Tensor], Tensor]) -> Statistics:
    def broken(weights: Tensor, seen: Tensor) -> dict[str, Tensor]:
        return s.row_statistics(weights, seen) | {name: f(weights, seen) for name, f in changed.items()}

    return broken


@pytest.mark.parametrize(
    "broken",
    [
        _with(entropy=lambda w, _: s.entropies(w) / math.log(2)),
        _with(entropy=lambda w, _: s.entropies(w.clamp_min(0))),
        _with(negative_share=lambda w, _: (w < 0).double().mean(-1)),
        _with(negative_share=lambda w, _: (w < 0).double().sum(-1) / (w != 0).double().sum(-1)),
        _with(row_mass=lambda w, _: w.sum(-1)),
        _with(top_share=lambda w, _: w.amax(-1) / w.sum(-1)),
        _with(effective_keys=lambda w, _: s.shares(w).square().sum(-1).reciprocal()),
        _with(evenness=lambda w, n: s.entropies(w) / (n.double() + 1).log()),
    ],
    ids=["bits", "positive part", "of the window", "a count", "a sum", "signed top", "Simpson's", "a key more"],
)
def test_a_broken_statistic_is_caught(broken: Statistics) -> None:
    with pytest.raises(AssertionError):
        laws(broken)


@pytest.mark.parametrize("t", SIZES)
@given(seed=st.integers(0, 99), factor=st.sampled_from([-1e9, -1.0, 1e-12, 3.0, 1e12]))
def test_scale_and_order_of_keys(t: int, seed: int, factor: float) -> None:
    w = causal(t, seed)
    found = s.row_statistics(w, keys(t))
    scaled = s.row_statistics(w * factor, keys(t))
    moved = s.row_statistics(w[..., torch.randperm(t, generator=torch.Generator().manual_seed(seed))], keys(t))
    for name, value in found.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-9, atol=1e-12, equal_nan=True)
        expected = value
        if name in ("row_sum", "row_mass"):
            expected = value * (factor if name == "row_sum" else abs(factor))
        elif name == "negative_share" and factor < 0:
            expected = 1 - value
        torch.testing.assert_close(scaled[name], expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    if t > 1:
        torch.testing.assert_close(s.log_odds(w * factor), s.log_odds(w), rtol=1e-9, atol=1e-9)
    effective = found["effective_keys"]
    assert bool(((effective >= 1 - 1e-12) & (effective <= keys(t) + 1e-9)).all())
    assert bool((found["top_share"] * effective >= 1 - 1e-9).all())  # exp(H) ≥ 1 / max p


def test_log_odds_of_a_softmax_are_linear_in_its_scale() -> None:
    scores = causal(9, 1)
    scores[scores == 0] = -torch.inf
    one = s.log_odds(scores.softmax(-1))[:, 1:]
    for scale in (0.25, 2.0, 4.0):
        torch.testing.assert_close(s.log_odds((scores * scale).softmax(-1))[:, 1:], one * scale)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_says_nothing_says_nan_and_spoils_no_other(poison: float) -> None:
    w = causal(5, 3)
    clean = s.row_statistics(w, keys(5))
    w[0, 3, 1] = poison
    w[1, 2] = 0
    found = s.row_statistics(w, keys(5))
    for name, value in found.items():
        assert math.isnan(value[0, 3])
        assert math.isnan(value[1, 2]) == (name not in ("row_sum", "row_mass"))
        value[0, 3], value[1, 2] = clean[name][0, 3], clean[name][1, 2]
        close(value, clean[name])


@given(last=st.integers(1, 5000))
def test_bins_hold_every_number_once(last: int) -> None:
    found = s.bins(last)
    assert [n for a, b in found for n in range(a, b + 1)] == list(range(1, last + 1))
    assert len(found) <= 2 * math.log2(last) + 2
    numbers = torch.arange(1, last + 1)
    place = s.places_in(found, numbers)
    assert bool((torch.tensor([a for a, _ in found])[place] <= numbers).all())
    assert bool((torch.tensor([b for _, b in found])[place] >= numbers).all())


def test_means_leave_out_what_is_not_finite() -> None:
    means = s.Means(2, 3)
    nan, inf = torch.nan, torch.inf
    means.add(torch.tensor([[1.0, nan, 3.0], [inf, 2.0, 4.0]]), torch.tensor([0, 0, 1]))
    means.add(torch.tensor([[5.0], [6.0]]), torch.tensor([1]))
    assert [s.as_values(row) for row in means.mean] == [[1.0, 4.0, None], [2.0, 5.0, None]]


def test_medians() -> None:
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([[3.0, 1.0, 2.0], [nan, 5.0, nan], [inf, inf, 1.0], [nan, nan, nan], [-0.0, -0.0, 0.0]])
    assert s.medians(x) == [2.0, 5.0, None, None, 0.0]
    assert s.medians(torch.empty(2, 0)) == [None, None]
