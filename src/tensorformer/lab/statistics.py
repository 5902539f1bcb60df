"""What a handful of seeds can say: paired differences, equivalence within delta, and how much data a change is worth.

A difference is decided by two tests over the per-seed differences d (variant − baseline): the paired t-test asks
whether their mean is not 0, and two one-sided tests (TOST) whether it lies within ±delta. Each family of p-values, one
a variant, is corrected by Holm's procedure: among variants that equal the baseline a false "better" or "worse", and
among variants that differ by delta or more a false "same", is found in at most ``alpha`` of all experiments.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64
from scipy import special

from tensorformer.errors import ConfigError
from tensorformer.lab.results import Difference, Estimate, Ratio, Verdict

CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 1_000
_NODES = 32  # of the quadrature over the standard deviation: power to 3e-5 from two seeds on


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds with its 95 % t-interval:  mean ± t(0.975, n − 1) · sd / √n.

    Args:
        values: one number a seed.

    Returns:
        The estimate; its bounds are None with one value.

    Raises:
        ValueError: there is no value, or one is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"an estimate needs finite numbers, at least one: {list(values)}")
    n = len(values)
    mean, se = _mean_and_error(values)
    if n == 1:
        return Estimate(mean, None, None, n)
    half = float(special.stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * se
    return Estimate(mean, mean - half, mean + half, n)


def compare_all(
    baseline: Mapping[int, float],
    variants: Mapping[str, Mapping[int, float]],
    delta: float,
    alpha: float = 0.05,
) -> dict[str, Difference]:
    """Judge every variant against the baseline by its paired differences.

    A variant is "same" where TOST rejects: differences below delta do not matter, so this holds also where a small
    difference is significant. Otherwise it is "better" or "worse" where the t-test rejects, and "undecided" where
    neither does, as always with one seed. Differences without any spread are decided as they stand.

    ``seeds_to_decide`` is the smallest number of seeds with which one of the two tests would reject in 8 of 10
    experiments, were the observed mean and standard deviation the true ones, each test at the level at which Holm's
    procedure met it here, alpha / (m − rank). It is given for decided verdicts too: more than the seeds used means
    that the verdict was lucky. None: over 1,000, or one seed, which shows no spread.

    Args:
        baseline: seed → loss, nats per token.
        variants: name → seed → loss, over the same seeds.
        delta: the difference that starts to matter, nats per token.
        alpha: the level of each family of tests.

    Returns:
        Name → difference, its p-values after Holm's correction, its interval not corrected.

    Raises:
        ConfigError: the seeds are not the baseline's, or delta or alpha is out of range.
        ValueError: a loss is not finite.
    """
    if not delta > 0:
        raise ConfigError(
            f"compare.delta = {delta}: must be above 0; give the difference in nats that starts to matter"
        )
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha = {alpha}: must lie between 0 and 1")
    differences = {name: paired(baseline, losses, name) for name, losses in variants.items()}
    estimates = {name: estimate(list(d.values())) for name, d in differences.items()}
    if len(baseline) < 2:
        return {
            name: Difference(estimates[name], differences[name], None, None, "undecided", None) for name in variants
        }
    tests = {name: _p_values(list(d.values()), delta) for name, d in differences.items()}
    different = holm({name: p for name, (p, _) in tests.items()})
    same = holm({name: p for name, (_, p) in tests.items()})
    ranks = [_ranks({name: p[family] for name, p in tests.items()}) for family in (0, 1)]
    results = {}
    for name, mean in ((name, e.mean) for name, e in estimates.items()):
        verdict: Verdict = "undecided"
        if same[name] <= alpha:
            verdict = "same"
        elif different[name] <= alpha:
            verdict = "better" if mean < 0 else "worse"
        sd = _mean_and_error(list(differences[name].values()))[1] * math.sqrt(len(baseline))
        levels = [alpha / (len(variants) - rank[name]) for rank in ranks]
        results[name] = Difference(
            estimate=estimates[name],
            per_seed=differences[name],
            p_different=different[name],
            p_same=same[name],
            verdict=verdict,
            seeds_to_decide=seeds_to_decide(mean, sd, delta, levels[0], levels[1]),
        )
    return results


def paired(baseline: Mapping[int, float], losses: Mapping[int, float], name: str) -> dict[int, float]:
    """Return seed → loss − baseline, or raise a ConfigError if the seeds are not the same."""
    if baseline.keys() != losses.keys() or not baseline:
        raise ConfigError(
            f"{name} has seeds {sorted(losses)} and the baseline {sorted(baseline)}: a paired comparison needs "
            "the same ones, at least one; finish the missing runs or change compare.seeds"
        )
    return {seed: losses[seed] - baseline[seed] for seed in sorted(baseline)}


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number:  p'₍ᵢ₎ = max over j ≤ i of min(1, (m − j) · p₍ⱼ₎), counted from 0."""
    ranks = _ranks(p_values)
    corrected = {}
    highest = 0.0
    for name in sorted(p_values, key=lambda name: p_values[name]):
        highest = max(highest, min(1.0, (len(p_values) - ranks[name]) * p_values[name]))
        corrected[name] = highest
    return corrected


def _ranks(p_values: Mapping[str, float]) -> dict[str, int]:
    """Return how many p-values are smaller: equal ones share the lowest rank, whatever their order."""
    return {name: sum(other < p for other in p_values.values()) for name, p in p_values.items()}


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error (0 with one value)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def _p_values(differences: Sequence[float], delta: float) -> tuple[float, float]:
    """Return p of the two-sided paired t-test against 0, and of TOST within ±delta."""
    mean, se = _mean_and_error(differences)
    if se == 0:
        return float(mean == 0), float(abs(mean) >= delta)
    freedom = len(differences) - 1
    return 2 * float(special.stdtr(freedom, -abs(mean) / se)), float(special.stdtr(freedom, (abs(mean) - delta) / se))


def seeds_to_decide(mean: float, sd: float, delta: float, level_different: float, level_same: float) -> int | None:
    """Return the smallest number of seeds that decides in 8 of 10 experiments, or None if it is over 1,000.

    Args:
        mean: the true difference, nats per token.
        sd: the true standard deviation of a seed's difference.
        delta: the bound of TOST.
        level_different: at which the t-test rejects.
        level_same: at which TOST rejects.
    """
    if sd == 0:
        return 2
    edges = [2, 9, 33, 129, 400, MOST_SEEDS + 1]
    for first, end in itertools.pairwise(edges):
        power = _power(mean / sd, delta / sd, level_different, level_same, first, end)
        if (enough := np.flatnonzero(power >= POWER)).size:
            return first + int(enough[0])
    return None


def _power(
    mean: float, delta: float, level_different: float, level_same: float, first: int, end: int
) -> Float64[np.ndarray, " n"]:
    """Return for n = first … end − 1 the probability that either test rejects; mean and delta in units of the sd.

    Given the observed sd s, the two tests leave  δ − t_same·s/√n < |d̄| < t_different·s/√n  undecided, and d̄ is normal
    around the mean with sd 1/√n. That probability is averaged over s² ~ χ²(n − 1) / (n − 1) by Gauss-Legendre.
    """
    n = np.arange(first, end)[:, None]
    spread, weights = _spreads(first, end)
    root = np.sqrt(n)
    t_different = -special.stdtrit(n - 1, level_different / 2)
    t_same = -special.stdtrit(n - 1, level_same)
    upper = t_different * spread
    lower = np.clip(delta * root - t_same * spread, 0, upper)
    centre = mean * root
    undecided = special.ndtr(upper - centre) - special.ndtr(lower - centre)
    undecided += special.ndtr(-lower - centre) - special.ndtr(-upper - centre)
    return 1 - undecided @ weights


@functools.cache
def _spreads(first: int, end: int) -> tuple[Float64[np.ndarray, "n nodes"], Float64[np.ndarray, " nodes"]]:
    """Return quantiles of s / sd for every n, and the weights with which to average over them."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    freedom = np.arange(first, end)[:, None] - 1
    return np.sqrt(special.chdtri(freedom, (1 - nodes) / 2) / freedom), weights / 2


def data_to_match(curve: Mapping[int, Mapping[int, float]], variant_losses: Mapping[int, float], tokens: int) -> Ratio:
    """Return how much data a variant needs, relative to the baseline, for the same loss.

    For each seed the baseline's loss, linear in log(tokens) between the measured points, is solved for the number of
    tokens B that gives the variant's loss; the ratio is tokens / B, above 1 where the variant needs more. Where noise
    makes a seed's curve rise, it is replaced by the closest curve that does not (isotonic regression); a loss that
    meets a flat stretch counts as its middle. The value is the geometric mean over seeds, with a 95 % t-interval on
    the logarithms.

    A seed whose loss lies outside its curve counts with the edge of the measured range, and there is no interval.
    Losses above the curve (worse than with the least data measured) make the value a lower bound, ``">"``; losses
    below it make it an upper bound, ``"<"``. With seeds beyond both ends no bound can be given: the value stands alone.

    Args:
        curve: seed → tokens → the baseline's loss when trained on so many tokens, nats per token.
        variant_losses: seed → the variant's loss, trained on ``tokens``.
        tokens: of the variant's runs.

    Raises:
        ConfigError: the seeds are not the same, or a seed has fewer than two points.
    """
    if curve.keys() != variant_losses.keys() or not curve:
        raise ConfigError(
            f"the baseline's curve has seeds {sorted(curve)} and the variant {sorted(variant_losses)}: "
            "data-to-match needs the same ones, at least one"
        )
    solved = [_tokens_for_loss(curve[seed], variant_losses[seed]) for seed in sorted(curve)]
    logs = [math.log(tokens) - log_tokens for log_tokens, _ in solved]
    sides = {side for _, side in solved}
    mean = estimate(logs)
    value = math.exp(mean.mean)
    if sides == {0} and mean.low is not None and mean.high is not None:
        return Ratio(value, math.exp(mean.low), math.exp(mean.high))
    above, below = 1 in sides, -1 in sides
    return Ratio(value, None, None, "" if above == below else ">" if above else "<")


def _tokens_for_loss(points: Mapping[int, float], loss: float) -> tuple[float, int]:
    """Return log(tokens) at which a curve has this loss, and 1 (−1) if the loss lies above (below) all of it."""
    if len(points) < 2 or not all(math.isfinite(x) for x in (*points.values(), loss)):
        raise ConfigError(f"data-to-match needs the baseline at two or more numbers of tokens, all finite: {points}")
    logs = [math.log(t) for t in sorted(points)]
    losses = _falling([points[t] for t in sorted(points)])
    if loss > losses[0]:
        return logs[0], 1
    if loss < losses[-1]:
        return logs[-1], -1
    first = next(i for i, value in enumerate(losses) if value <= loss)
    last = max(i for i, value in enumerate(losses) if value >= loss)
    if first <= last:  # the loss of one point, or of a flat stretch
        return (logs[first] + logs[last]) / 2, 0
    share = (losses[last] - loss) / (losses[last] - losses[first])
    return logs[last] + share * (logs[first] - logs[last]), 0


def _falling(losses: Sequence[float]) -> list[float]:
    """Return the closest sequence that never rises: neighbours that do are pooled to their mean."""
    pools: list[tuple[float, int]] = []
    for loss in losses:
        pools.append((loss, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [value for value, count in pools for _ in range(count)]


def scale(ratio: Ratio, factor: float) -> Ratio:
    """Multiply a ratio, its interval and its bound by a positive number: data to match × time a token = time to match.

    Raises:
        ValueError: the factor is not positive and finite.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"a ratio is scaled by a positive number, not {factor}")
    low, high = (None if bound is None else bound * factor for bound in (ratio.low, ratio.high))
    return Ratio(ratio.value * factor, low, high, ratio.bound)
