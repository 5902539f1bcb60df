"""What a matrix of attention weights says about its rows; all functions take signed weights and return float64."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorformer.study.routing_result import Values

BINS_AN_OCTAVE = 2


def row_statistics(weights: Float[Tensor, "h t s"], keys: Int[Tensor, " t"]) -> dict[str, Float[Tensor, "h t"]]:
    """Return each quantity of every row; NaN where the row has no mass, or a weight is not finite.

    Args:
        weights: of each head.
        keys: how many keys each row sees.
    """
    w = weights.double()
    size = w.abs()
    mass = size.sum(-1)
    finite = mass.isfinite()
    entropy = entropies(w)
    found = {
        "row_sum": w.sum(-1),
        "row_mass": mass,
        "negative_share": (-w).clamp_min(0).sum(-1) / mass,
        "entropy": entropy,
        "evenness": entropy / keys.double().log(),
        "effective_keys": entropy.exp(),
        "top_share": size.amax(-1) / mass,
    }
    return {name: value.masked_fill(~finite, torch.nan) for name, value in found.items()}


def shares(weights: Float[Tensor, "h t s"]) -> Float[Tensor, "h t s"]:
    """Return |A| / Σ|A| of every row; NaN where that is 0/0."""
    size = weights.double().abs()
    return size / size.sum(-1, keepdim=True)


def entropies(weights: Float[Tensor, "h t s"]) -> Float[Tensor, "h t"]:
    """Return −Σ p log p of every row in nats, p its shares."""
    p = shares(weights)
    return -torch.special.xlogy(p, p).sum(-1)


def log_odds(weights: Float[Tensor, "h t s"]) -> Float[Tensor, "h t"]:
    """Return the log of the largest over the second largest magnitude of every row; inf where the second is 0."""
    first, second = weights.double().abs().topk(2, -1).values.unbind(-1)
    return first.log() - second.log()


def bins(last: int) -> list[tuple[int, int]]:
    """Return whole numbers from 1 to ``last`` as bins, two an octave: (first, last) of each."""
    n = math.ceil(BINS_AN_OCTAVE * math.log2(max(last, 1))) + 1
    ends = sorted({min(last, math.floor(2 ** (i / BINS_AN_OCTAVE) + 1e-9)) for i in range(n)} | {last})
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def places_in(found: list[tuple[int, int]], numbers: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Return which bin each number is in."""
    return torch.bucketize(numbers, torch.tensor([end for _, end in found], device=numbers.device))


def as_values(x: Float[Tensor, " n"]) -> Values:
    """Return numbers for JSON, which knows neither NaN nor infinity."""
    return [value + 0.0 if math.isfinite(value) else None for value in x.tolist()]  # −0 becomes 0


def medians(x: Float[Tensor, "h n"]) -> Values:
    """Return the median of each head's values, the lower of two, NaN left out; None where it is not finite."""
    return as_values(x.nanmedian(1).values) if x.shape[1] else [None] * len(x)


class Means:
    """Means of a quantity in bins, one for each head.

    Args:
        heads: rows of every addition.
        n: bins.
    """

    def __init__(self, heads: int, n: int) -> None:
        self.total = torch.zeros(heads, n, dtype=torch.float64)
        self.count = torch.zeros(heads, n, dtype=torch.float64)

    def add(self, values: Float[Tensor, "h n"], place: Int[Tensor, " n"]) -> None:
        """Add values, each to its bin; those not finite are left out."""
        values, place = values.double().cpu(), place.cpu()
        known = values.isfinite()
        self.total.index_add_(1, place, values.masked_fill(~known, 0))
        self.count.index_add_(1, place, known.double())

    @property
    def mean(self) -> Float[Tensor, "h bins"]:
        """The means; NaN in an empty bin."""
        return self.total / self.count
