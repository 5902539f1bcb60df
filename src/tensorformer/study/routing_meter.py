"""Gathering what one layer's weights say, window by window."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.study import routing_change as change
from tensorformer.study import routing_statistics as s
from tensorformer.study.routing_result import CHANGES, GAINS, GROWN, SCALES, Exchange, Head, Layer

ROWS = 256  # taken through the statistics at a time, to bound the memory of their float64
CURVES = (
    "row_sum",
    "row_sum_deviation",
    "row_mass",
    "negative_share",
    "entropy",
    "evenness",
    "effective_keys",
    "top_share",
    "sum_rms",
)
LEAST_GAIN = 1e-3  # of a row's mass, below which what the others lost is rounding
CHANGED_WINDOWS = 2  # in which keys and queries are changed: each change reads all weights anew


class LayerMeter:
    """Everything about one layer.

    Args:
        index: of the layer.
        name: of its mixer.
        mixer: the mixer, which is asked for its weights.
        length: tokens of every window.
        context: tokens of a training window; ``length`` at most.
    """

    def __init__(self, index: int, name: str, mixer: change.Attention, length: int, context: int) -> None:
        self.index, self.name, self.mixer, self.context = index, name, mixer, context
        self.keys, self.distances = s.bins(length), s.bins(context)
        h = mixer.heads.n_heads
        self.means: dict[str, s.Means] = {}
        self.distance, self.output = s.Means(h, len(self.distances)), s.Means(1, len(self.keys))
        self.log_odds: list[list[Tensor]] = [[] for _ in SCALES]
        self.top_share: list[list[Tensor]] = [[] for _ in SCALES]
        self.exchanged: dict[str, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in CHANGES}
        self.windows = self.left_out = 0

    def update(self, x: Float[Tensor, "1 t d"], sums: Float[Tensor, "1 t hv"], output: Float[Tensor, "1 t d"]) -> None:
        """Take one window.

        Args:
            x: what went into the mixer.
            sums: the heads' sums over values, side by side.
            output: what came out of it.
        """
        keys = torch.arange(1, x.shape[1] + 1, device=x.device)
        place = s.places_in(self.keys, keys)
        heads = sums[0].unflatten(-1, (self.mixer.heads.n_heads, -1))
        self._mean("sum_rms", heads.double().square().mean(-1).sqrt().T, place)
        self.output.add(output.double().square().mean(-1).sqrt(), place)
        weights = self.mixer.weights(x)[0]
        for first in range(0, x.shape[1], ROWS):
            rows = slice(first, first + ROWS)
            found = s.row_statistics(weights[:, rows], keys[rows])
            self.left_out += int(found["row_mass"].isnan().sum())
            for quantity, values in found.items():
                self._mean(quantity, values, place[rows])
            self._mean("row_sum_square", found["row_sum"].square(), place[rows])
        inside, late = x[:, : self.context], slice(self.context // 2, self.context)
        self._distances(weights[:, late, : self.context])
        if self.windows < CHANGED_WINDOWS:
            self._sharpness(inside, late)
            self._exchange(inside)
        self.windows += 1

    def result(self) -> Layer:
        """Return what was found."""
        means = {quantity: mean.mean for quantity, mean in self.means.items()}
        means["row_sum_deviation"] = (means.pop("row_sum_square") - means["row_sum"].square()).clamp_min(0).sqrt()
        odds = torch.tensor([s.medians(torch.cat(at, 1)) for at in self.log_odds], dtype=torch.float64)
        top = torch.tensor([s.medians(torch.cat(at, 1)) for at in self.top_share], dtype=torch.float64)
        heads = [
            Head(
                {quantity: s.as_values(means[quantity][i]) for quantity in CURVES},
                s.as_values(self.distance.mean[i]),
                s.as_values(odds[:, i]),
                s.as_values(top[:, i]),
                {kind: _exchange([(g[i], t[i]) for g, t in pairs]) for kind, pairs in self.exchanged.items()},
            )
            for i in range(self.mixer.heads.n_heads)
        ]
        return Layer(self.index, self.name, heads, s.as_values(self.output.mean[0]), self.left_out)

    def _mean(self, quantity: str, values: Float[Tensor, "h n"], place: Tensor) -> None:
        self.means.setdefault(quantity, s.Means(len(values), len(self.keys))).add(values, place)

    def _distances(self, weights: Float[Tensor, "h rows s"]) -> None:
        share = s.shares(weights)
        steps = torch.arange(weights.shape[2], device=weights.device)
        distance = steps[len(steps) - weights.shape[1] :].unsqueeze(1) - steps
        seen = distance >= 0
        # Bins begin at 1, distances at 0.
        self.distance.add(share[:, seen], s.places_in(self.distances, distance[seen] + 1))

    def _sharpness(self, x: Float[Tensor, "1 t d"], late: slice) -> None:
        for i, scale in enumerate(SCALES):
            with change.queries_scaled(self.mixer, scale):
                weights = self.mixer.weights(x)[0, :, late]
            self.log_odds[i].append(s.log_odds(weights).cpu())
            self.top_share[i].append(s.shares(weights).amax(-1).cpu())

    def _exchange(self, x: Float[Tensor, "1 t d"]) -> None:
        here = self.mixer.weights(x)[0]
        steps = [0] + [2**i for i in range(x.shape[1].bit_length()) if 2**i < x.shape[1]]
        for step in steps:
            with change.key_hidden(self.mixer, step):
                without = self.mixer.weights(x)[0]
            with change.key_scaled(self.mixer, step, GROWN):
                grown = self.mixer.weights(x)[0]
            for kind, before, after in zip(CHANGES, (without, here), (here, grown), strict=True):
                self.exchanged[kind].append(exchanged(before[:, step:], after[:, step:], step))


def exchanged(
    before: Float[Tensor, "h rows s"], after: Float[Tensor, "h rows s"], step: int
) -> tuple[Float[Tensor, "h rows"], Float[Tensor, "h rows"]]:
    """Return how much weight a key gained and how the others' mass changed, over the mass of its row before.

    Args:
        before: weights of rows that see the key.
        after: the same rows with more of it.
        step: the key's.
    """
    (own, others), (own_after, others_after) = (_apart(w, step) for w in (before, after))
    mass = own + others
    return ((own_after - own) / mass).cpu(), ((others_after - others) / mass).cpu()


def _apart(weights: Float[Tensor, "h rows s"], step: int) -> tuple[Tensor, Tensor]:
    size = weights.double().abs()
    own = size[..., step].clone()
    size[..., step] = 0
    return own, size.sum(-1)


def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> Exchange:
    gain, taken = torch.cat([g for g, _ in pairs]), torch.cat([t for _, t in pairs])
    told = (gain > LEAST_GAIN) & gain.isfinite() & taken.isfinite()
    gain, rates = gain[told], (-taken / gain)[told]
    within = [_median(rates[(gain > low) & (gain <= high)]) for low, high in GAINS]
    return Exchange(_median(rates), len(rates), within)


def _median(x: Float[Tensor, " n"]) -> float | None:
    return s.medians(x.unsqueeze(0))[0]
