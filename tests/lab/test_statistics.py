"""Statistics against scipy, closed forms, hand calculation and simulation; an unpaired and an uncorrected one fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import integrate, stats

from tensorformer.errors import ConfigError
from tensorformer.lab import statistics
from tensorformer.lab.results import Difference, Ratio
from tensorformer.lab.statistics import compare_all, data_to_match, estimate, holm, scale, seeds_to_decide

Losses = Mapping[int, float]
Compare = Callable[[Losses, Mapping[str, Losses], float], dict[str, Difference]]

losses = st.integers(2, 8).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(1_000, 3_000).map(lambda x: x / 1_000), min_size=n, max_size=n) for _ in range(3))
    )
)


def by_seed(values: object) -> dict[int, float]:
    return {3 * i + 1: float(v) for i, v in enumerate(np.asarray(values))}


def one(baseline: object, variant: object, delta: float = 0.01) -> Difference:
    return compare_all(by_seed(baseline), {"v": by_seed(variant)}, delta)["v"]


@dataclass(frozen=True)
class Noise:
    """Many experiments: seeds move baseline and variants alike by ``seed_sd``, and each variant by ``sd``."""

    mean: float
    sd: float = 0.01
    seed_sd: float = 0.1
    n: int = 5
    variants: int = 1

    def rate(self, compare: Compare, wanted: set[str], repeats: int, delta: float, seed: int = 0) -> float:
        """Share of experiments in which any variant gets one of these verdicts."""
        rng = np.random.default_rng(seed)
        hits = 0
        for _ in range(repeats):
            baseline = 2 + self.seed_sd * rng.standard_normal(self.n)
            variants = {
                str(v): by_seed(baseline + self.mean + self.sd * rng.standard_normal(self.n))
                for v in range(self.variants)
            }
            found = compare(by_seed(baseline), variants, delta)
            hits += any(difference.verdict in wanted for difference in found.values())
        return hits / repeats


def unpaired(baseline: Losses, variants: Mapping[str, Losses], delta: float) -> dict[str, Difference]:
    """Broken on purpose: pairs a seed with another seed, which is what an unpaired test amounts to."""
    seeds = sorted(baseline)
    turned = dict(zip(seeds, [baseline[s] for s in seeds[1:] + seeds[:1]], strict=True))
    return compare_all(turned, variants, delta)


def uncorrected(baseline: Losses, variants: Mapping[str, Losses], delta: float) -> dict[str, Difference]:
    """Broken on purpose: judges every variant as if it were the only one."""
    return {name: compare_all(baseline, {name: seeds}, delta)[name] for name, seeds in variants.items()}


def check_paired(compare: Compare) -> None:
    """What a seed does to every variant alike changes no verdict: a clear small difference is found."""
    assert Noise(mean=0.03).rate(compare, {"worse"}, 60, delta=0.001) > 0.9


def check_false_alarms(compare: Compare, repeats: int) -> None:
    """Among eight variants that equal the baseline, any is called different in at most 5 % of experiments."""
    rate = Noise(mean=0, variants=8).rate(compare, {"better", "worse"}, repeats, delta=1e-9)
    assert rate < 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.fixture
def verdicts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of a comparison goes into planning the next one, which a simulation does not need."""
    monkeypatch.setattr(statistics, "seeds_to_decide", lambda *_: None)


@pytest.mark.usefixtures("verdicts_only")
def test_pairing_and_what_breaks_it() -> None:
    check_paired(compare_all)
    with pytest.raises(AssertionError):
        check_paired(unpaired)


@pytest.mark.usefixtures("verdicts_only")
def test_false_alarms_and_what_breaks_them() -> None:
    check_false_alarms(compare_all, 400)
    with pytest.raises(AssertionError):
        check_false_alarms(uncorrected, 400)


@pytest.mark.usefixtures("verdicts_only")
def test_error_rates_of_many_experiments() -> None:
    check_false_alarms(compare_all, 2_000)
    for variants in (1, 4):  # a difference of exactly delta is the hardest to keep from being called the same
        rate = Noise(mean=0.01, variants=variants, n=8).rate(compare_all, {"same"}, 2_000, delta=0.01)
        assert rate < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2_000)


@pytest.mark.usefixtures("verdicts_only")
@pytest.mark.parametrize(("mean", "delta"), [(0.008, 1e-9), (0.0, 0.008), (0.004, 0.012), (0.01, 0.012), (0.02, 0.005)])
def test_the_number_of_seeds_decides_in_eight_of_ten(mean: float, delta: float) -> None:
    n = seeds_to_decide(mean, 0.01, delta, 0.05, 0.05)
    assert n is not None
    repeats, decided = 3_000, {"better", "worse", "same"}
    rate = Noise(mean=mean, n=n).rate(compare_all, decided, repeats, delta)
    assert rate > 0.8 - 3 * math.sqrt(0.8 * 0.2 / repeats)
    if n > 2:
        assert Noise(mean=mean, n=n - 1).rate(compare_all, decided, repeats, delta) < 0.8 + 0.022


def test_estimate_is_the_t_interval() -> None:
    values = [1.71, 1.68, 1.70, 1.73]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert found.n == 4
    assert [found.mean, found.low, found.high] == pytest.approx([np.mean(values), low, high], rel=1e-12)
    assert estimate([1.5]) == statistics.Estimate(1.5, None, None, 1)
    for bad in ([], [math.nan], [1.0, math.inf]):
        with pytest.raises(ValueError, match="finite"):
            estimate(bad)


@given(losses, st.sampled_from([0.001, 0.1, 1.0]))
def test_p_values_are_scipys(values: tuple[list[float], ...], delta: float) -> None:
    baseline, variant = np.array(values[0]), np.array(values[1])
    d = variant - baseline
    assume(d.std() > 1e-9)
    found = one(baseline, variant, delta)
    assert found.p_different == pytest.approx(stats.ttest_rel(variant, baseline).pvalue, rel=1e-6)
    _, lower = stats.ttest_1samp(d, -delta, alternative="greater")
    _, upper = stats.ttest_1samp(d, delta, alternative="less")
    assert found.p_same == pytest.approx(max(lower, upper), rel=1e-6)
    interval = stats.ttest_rel(variant, baseline).confidence_interval()
    assert [found.estimate.low, found.estimate.high] == pytest.approx([interval.low, interval.high], abs=1e-9)
    assert found.per_seed == pytest.approx(by_seed(d))


def test_holm_by_hand() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.7, "b": 0.6}) == {"b": 1.0, "a": 1.0}
    assert holm({"a": 0.02, "b": 0.02}) == {"a": 0.04, "b": 0.04}
    assert holm({}) == {}


def test_verdicts() -> None:
    noise = np.array([0.0, 0.001, -0.001, 0.002, -0.002])
    base = np.array([1.7, 1.75, 1.68, 1.71, 1.72])
    assert one(base, base + 0.1 + noise).verdict == "worse"
    assert one(base, base - 0.1 + noise).verdict == "better"
    assert one(base, base + noise, delta=0.01).verdict == "same"
    assert one(base, base + 20 * noise, delta=0.01).verdict == "undecided"
    both = one(base, base + 0.003 + noise, delta=0.01)  # significant, and too small to matter
    assert both.p_different is not None
    assert both.p_different < 0.05
    assert both.verdict == "same"


@pytest.mark.parametrize(
    ("shift", "verdict", "p_different", "p_same"),
    [(0.0, "same", 1.0, 0.0), (0.0625, "same", 0.0, 0.0), (0.5, "worse", 0.0, 1.0), (-0.5, "better", 0.0, 1.0)],
)
def test_no_spread_at_all(shift: float, verdict: str, p_different: float, p_same: float) -> None:
    found = one([1.0, 1.5, 2.0], np.array([1.0, 1.5, 2.0]) + shift, delta=0.25)
    assert (found.verdict, found.p_different, found.p_same, found.seeds_to_decide) == (verdict, p_different, p_same, 2)
    assert (found.estimate.low, found.estimate.high) == (shift, shift)


def test_a_copy_of_the_baseline_is_the_same() -> None:
    base = [1.703, 1.7184, 1.6951]
    assert one(base, base, delta=1e-6).verdict == "same"
    assert one(base, np.array(base) + 0.1 - 0.1, delta=1e-6).verdict == "same"  # but for rounding
    assert one(base, np.array(base) + 0.3, delta=0.01).verdict == "worse"


def test_one_seed_decides_nothing() -> None:
    found = one([1.7], [1.9])
    assert (found.p_different, found.p_same, found.verdict, found.seeds_to_decide) == (None, None, "undecided", None)
    assert (found.estimate.mean, found.estimate.low) == (pytest.approx(0.2), None)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"v has seeds \[1, 2\] and the baseline \[1, 3\]"):
        compare_all({1: 1.0, 3: 1.0}, {"v": {2: 1.0, 1: 1.0}}, 0.01)
    with pytest.raises(ConfigError, match="at least one"):
        compare_all({}, {"v": {}}, 0.01)
    for delta, alpha in ((0.0, 0.05), (-1.0, 0.05), (math.nan, 0.05), (0.1, 0.0), (0.1, 1.0)):
        with pytest.raises(ConfigError, match=r"compare.delta|alpha"):
            compare_all({1: 1.0}, {}, delta, alpha)
    assert compare_all({1: 1.0}, {}, 0.01) == {}
    with pytest.raises(ValueError, match="finite"):
        compare_all({1: 1.0}, {"v": {1: math.nan}}, 0.01)


def close(a: Difference, b: Difference) -> None:
    assert a.p_different == pytest.approx(b.p_different, rel=1e-6, abs=1e-12)
    assert a.p_same == pytest.approx(b.p_same, rel=1e-6, abs=1e-12)
    assert a.estimate.mean == pytest.approx(b.estimate.mean, abs=1e-9)


FLIPPED = {"better": "worse", "worse": "better", "same": "same", "undecided": "undecided"}


@given(losses)
def test_invariances(values: tuple[list[float], ...]) -> None:
    baseline, a, b = (np.array(v) for v in values)
    assume(min((a - baseline).std(), (b - baseline).std()) > 1e-9)
    delta = 0.0701

    def compare(base: np.ndarray, **variants: np.ndarray) -> dict[str, Difference]:
        return compare_all(by_seed(base), {name: by_seed(v) for name, v in variants.items()}, delta)

    plain = compare(baseline, a=a, b=b)
    shifted = compare(baseline + 1, a=a + 1, b=b + 1)
    turned = compare(baseline[::-1], a=a[::-1], b=b[::-1])
    swapped = compare(baseline, b=b, a=a)
    flipped = compare(-baseline, a=-a, b=-b)
    for name in ("a", "b"):
        for other in (shifted, turned, swapped):
            close(other[name], plain[name])
            assert other[name].verdict == plain[name].verdict
        assert swapped[name].seeds_to_decide == plain[name].seeds_to_decide
        assert flipped[name].verdict == FLIPPED[plain[name].verdict]
        assert flipped[name].seeds_to_decide == plain[name].seeds_to_decide
        assert flipped[name].estimate.mean == -plain[name].estimate.mean


def test_seeds_to_decide_is_the_textbooks_number() -> None:
    """Two-sided paired t-test, 5 %, power 80 %, as every table of sample sizes has it."""
    for effect, n in ((0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)):
        assert seeds_to_decide(effect, 1.0, 1e-9, 0.05, 0.05) == n
        assert seeds_to_decide(-effect, 1.0, 1e-9, 0.05, 0.05) == n
    assert seeds_to_decide(0.01, 1.0, 0.01, 0.05, 0.05) is None
    assert seeds_to_decide(0.3, 0.0, 0.1, 0.05, 0.05) == 2


@pytest.mark.parametrize("n", [2, 3, 5, 20, 50])
@pytest.mark.parametrize("effect", [0.0, 0.1, 0.5, 1.2])
def test_power_of_the_t_test_is_the_noncentral_t(n: int, effect: float) -> None:
    critical = stats.t.isf(0.025, n - 1)
    shift = effect * math.sqrt(n)
    exact = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert statistics._power(effect, 1e-12, 0.05, 0.05, n, n + 1)[0] == pytest.approx(exact, abs=5e-5)


@pytest.mark.parametrize(("n", "mean", "delta"), [(4, 0.0, 1.5), (10, 0.2, 1.0), (40, 0.3, 0.6)])
def test_power_of_tost_is_its_integral(n: int, mean: float, delta: float) -> None:
    """The t-test is all but switched off by its level, so that only TOST decides."""

    def given_spread(s: float) -> float:
        half = max(delta * math.sqrt(n) - stats.t.isf(0.05, n - 1) * s, 0)
        shift = mean * math.sqrt(n)
        density = stats.chi.pdf(s * math.sqrt(n - 1), n - 1) * math.sqrt(n - 1)
        return float((stats.norm.cdf(half - shift) - stats.norm.cdf(-half - shift)) * density)

    most = delta * math.sqrt(n) / stats.t.isf(0.05, n - 1)
    exact, _ = integrate.quad(given_spread, 0, most)
    assert statistics._power(mean, delta, 1e-12, 0.05, n, n + 1)[0] == pytest.approx(exact, abs=1e-3)


CURVE = {500: 2.0, 1_000: 1.8, 2_000: 1.5}


def ratio(variant: float | list[float], *curves: dict[int, float]) -> Ratio:
    values = variant if isinstance(variant, list) else [variant]
    points = curves or (CURVE,) * len(values)
    return data_to_match(dict(enumerate(points)), dict(enumerate(values)), 1_000)


def test_data_to_match_at_and_between_the_points() -> None:
    assert ratio(2.0).value == pytest.approx(2.0)
    assert ratio(1.8).value == pytest.approx(1.0)
    assert ratio(1.5).value == pytest.approx(0.5)
    assert ratio(1.9).value == pytest.approx(math.sqrt(2))  # halfway in log tokens
    assert ratio(1.7).value == pytest.approx(2 ** (-1 / 3))
    assert ratio(1.9).low is None
    assert ratio(1.9).bound == ""


def test_data_to_match_has_an_interval_on_the_logarithm() -> None:
    found = ratio([1.9, 1.8, 1.7])
    logs = np.log([math.sqrt(2), 1, 2 ** (-1 / 3)])
    low, high = stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
    assert [found.value, found.low, found.high] == pytest.approx([math.exp(float(x)) for x in (logs.mean(), low, high)])


def test_data_to_match_outside_what_was_measured() -> None:
    assert ratio([2.1, 2.2]) == Ratio(pytest.approx(2.0), None, None, ">")  # type: ignore[arg-type]
    assert ratio([1.4, 1.1]) == Ratio(pytest.approx(0.5), None, None, "<")  # type: ignore[arg-type]
    assert ratio([2.1, 1.8]) == Ratio(pytest.approx(math.sqrt(2)), None, None, ">")  # type: ignore[arg-type]
    assert ratio([2.1, 1.4]) == Ratio(pytest.approx(1.0), None, None, "")  # type: ignore[arg-type]
    assert ratio(2.1).bound == ">"


def test_a_curve_that_rises_is_smoothed() -> None:
    noisy = {500: 1.8, 1_000: 1.9, 2_000: 1.5}  # becomes 1.85, 1.85, 1.5
    assert ratio(1.85, noisy).value == pytest.approx(math.sqrt(2))  # the middle of the flat stretch
    assert ratio(1.675, noisy).value == pytest.approx(math.sqrt(0.5))
    assert ratio(1.87, noisy).bound == ">"


@given(st.lists(st.floats(1, 3), min_size=2, max_size=6), st.floats(1, 3), st.floats(1, 3))
def test_a_worse_variant_needs_no_less_data(points: list[float], one_loss: float, other: float) -> None:
    curve = {100 * 2**i: loss for i, loss in enumerate(points)}
    low, high = sorted((one_loss, other))
    assert ratio(low, curve).value <= ratio(high, curve).value * (1 + 1e-9)
    falling = statistics._falling(points)
    assert falling == sorted(falling, reverse=True)
    assert sum(falling) == pytest.approx(sum(points))


def test_data_to_match_refuses() -> None:
    with pytest.raises(ConfigError, match=r"curve has seeds \[0\] and the variant \[1\]"):
        data_to_match({0: CURVE}, {1: 1.8}, 1_000)
    with pytest.raises(ConfigError, match="two or more"):
        ratio(1.8, {1_000: 1.8})
    with pytest.raises(ConfigError, match="all finite"):
        ratio(math.nan)


def test_scale() -> None:
    assert scale(Ratio(2.0, 1.0, 4.0), 1.5) == Ratio(3.0, 1.5, 6.0)
    assert scale(Ratio(2.0, None, None, ">"), 0.5) == Ratio(1.0, None, None, ">")
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive"):
            scale(Ratio(2.0, 1.0, 4.0), factor)
