"""Solving widths, so that variants are compared at equal size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tensorformer.config.schema import Model
from tensorformer.config.shapes import blocks
from tensorformer.errors import ConfigError


class Match(NamedTuple):
    """A model whose widths were solved for, and what is left over."""

    model: Model
    remainder: float  # (measured − target) / target


def widths(model: Model) -> dict[str, int]:
    """Return ``d_ff`` of every feed-forward part that the model uses."""
    return {ffn: model.ffns[ffn].d_ff for _, ffn in blocks(model)}


def match(model: Model, target: int, measure: Callable[[Model], int], multiple_of: int, tolerance: float) -> Match:
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
    first = next(iter(widths(model)))
    unit = model.ffns[first].d_ff

    def scaled(k: int) -> Model:
        new = {}
        for name in widths(model):
            share = model.ffns[name].d_ff / unit
            new[name] = msgspec.structs.replace(model.ffns[name], d_ff=max(1, round(k * share)) * multiple_of)
        return msgspec.structs.replace(model, ffns={**model.ffns, **new})

    high = 1
    while measure(scaled(high)) < target:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(scaled(middle)) < target else (low, middle)
    best = min((scaled(low), scaled(high)), key=lambda m: abs(measure(m) - target))
    remainder = measure(best) / target - 1
    if abs(remainder) > tolerance:
        raise ConfigError(
            f"no d_ff that is a multiple of {multiple_of} comes within {tolerance:.1%} of the baseline: the nearest, "
            f"{widths(best)}, is off by {remainder:+.1%}; lower compare.multiple_of, raise compare.tolerance "
            f"or change the baseline's d_ff"
        )
    return Match(best, remainder)
