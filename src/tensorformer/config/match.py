"""Solving widths, so that variants are compared at equal size."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from tensorformer.config.count import active_parameters, parameters
from tensorformer.config.schema import Model
from tensorformer.config.widths import ROUTED, widths, with_widths
from tensorformer.errors import ConfigError

Measure = Callable[[Model], int]


class Match(NamedTuple):
    """A model whose widths were solved for, and what is left over."""

    model: Model
    remainder: float  # (measured − target) / target


def match(model: Model, target: int, measure: Measure, multiple_of: int, tolerance: float) -> Match:
    """Scale every ``d_ff`` in use by one factor until ``measure`` is nearest to ``target``.

    Args:
        model: its widths give the proportions between its feed-forward parts.
        target: parameters or FLOPs of the baseline.
        measure: counts the same of a model; must grow with its widths.
        multiple_of: widths are multiples of this, at least one.
        tolerance: largest relative remainder.

    Raises:
        ConfigError: no width comes within the tolerance.
    """
    best = _nearest(model, list(widths(model)), target, measure, multiple_of)
    return _within(best, measure(best) / target - 1, multiple_of, tolerance)


def match_with_active(model: Model, baseline: Model, multiple_of: int, tolerance: float) -> Match:
    """Solve for two factors, of the routed experts' widths and of all others, so that both counts are the baseline's.

    All parameters and those that a token meets (``active_parameters``) are matched; the remainder is the larger one of
    the two.

    Args:
        model: its widths give the proportions within either set.
        baseline: the model to be as large as.
        multiple_of, tolerance: as in ``match``.

    Raises:
        ConfigError: no widths come within the tolerance.
    """
    whole, active = parameters(baseline), active_parameters(baseline)
    routed = [name for name in widths(model) if name.endswith(ROUTED)]
    others = [name for name in widths(model) if not name.endswith(ROUTED)]
    if not routed or not others:
        return _judged(_nearest(model, list(widths(model)), whole, parameters, multiple_of), whole, active, multiple_of,
                       tolerance)  # fmt: skip

    def at(k: int) -> Model:
        """Return the model at k units of routed width, the others such that it is as large as the baseline."""
        return _nearest(_scaled(model, routed, k, multiple_of), others, whole, parameters, multiple_of)

    def is_too_narrow(k: int) -> bool:
        """Say so where a token meets too much; routed experts so wide that nothing is left for others are too wide."""
        found = at(k)
        left = any(widths(found)[name] > multiple_of for name in others)
        return left and active_parameters(found) > active

    # Routed experts weigh more in all parameters than in those a token meets: the wider they are, the less it meets.
    low, high = 1, 2
    while is_too_narrow(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_too_narrow(middle) else (low, middle)
    near = [at(k) for k in range(max(1, low - 1), high + 2)]
    best = min(near, key=lambda m: abs(_larger_remainder(m, whole, active)))
    return _judged(best, whole, active, multiple_of, tolerance)


def _nearest(model: Model, names: Collection[str], target: int, measure: Measure, multiple_of: int) -> Model:
    """Scale the widths of these names by one factor until ``measure`` is nearest to ``target``."""

    def scaled(k: int) -> Model:
        return _scaled(model, names, k, multiple_of)

    high = 1
    while measure(scaled(high)) < target:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(scaled(middle)) < target else (low, middle)
    return min((scaled(low), scaled(high)), key=lambda m: abs(measure(m) - target))


def _scaled(model: Model, names: Collection[str], k: int, multiple_of: int) -> Model:
    """Return the model with k multiples for the widest of these, and the others in proportion: at 1 all are least."""
    old = widths(model)
    unit = max(old[name] for name in names)
    return with_widths(model, {name: max(1, round(k * old[name] / unit)) * multiple_of for name in names})


def _larger_remainder(model: Model, whole: int, active: int) -> float:
    return max(parameters(model) / whole - 1, active_parameters(model) / active - 1, key=abs)


def _judged(best: Model, whole: int, active: int, multiple_of: int, tolerance: float) -> Match:
    further = "; to meet both sizes it may take another n_experts, router.top_k or shared experts"
    return _within(best, _larger_remainder(best, whole, active), multiple_of, tolerance, further)


def _within(best: Model, remainder: float, multiple_of: int, tolerance: float, further: str = "") -> Match:
    if abs(remainder) > tolerance:
        raise ConfigError(
            f"no d_ff that is a multiple of {multiple_of} comes within {tolerance:.1%} of the baseline: the nearest, "
            f"{widths(best)}, is off by {remainder:+.1%}; lower compare.multiple_of, raise compare.tolerance "
            f"or change the baseline's d_ff{further}"
        )
    return Match(best, remainder)
