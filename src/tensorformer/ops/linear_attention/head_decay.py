"""One decay a head, or none, inside one chunk: it multiplies scores and values from outside the products."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.ops.linear_attention import blocks
from tensorformer.ops.linear_attention.blocks import Decay

Branches = tuple[Tensor, ...]


class HeadDecay:
    """What `log_decay` (N, C), or None, does to the rows, keys and state of a chunk, and the gradients of that.

    `enter` carries rows from the start of the chunk into their step, `leave` keys from their step to its end,
    `across` a state over all of it, `scores` a key to a row. Rows are m blocks of C steps, the queries, and after
    them the keys where a key reads what is stored; a key does not read itself. Every gradient of a decay is the
    gradient of an exponent G_a − G_b: it is added at a and taken back at b, in float64, where it cancels to the
    last digit outside of the steps between.
    """

    def __init__(self, log_decay: Float[Tensor, "n c"] | None, dtype: torch.dtype) -> None:
        self.decay = None if log_decay is None else Decay(log_decay, dtype)
        self.d_total = None if log_decay is None else torch.zeros_like(log_decay, dtype=torch.float64)

    def enter(self, rows: Branches) -> Branches:
        if self.decay is None:
            return rows
        c = self.decay.total.shape[1]
        return ((rows[0].unflatten(1, (-1, c)) * self.decay.into(0, c).unsqueeze(1)).flatten(1, 2), *rows[1:])

    def enter_grad(self, entered: Branches, d_entered: Branches) -> Branches:
        if self.decay is None or self.d_total is None:
            return d_entered
        c = self.d_total.shape[1]
        self.d_total += (entered[0] * d_entered[0]).sum(2, dtype=torch.float64).unflatten(1, (-1, c)).sum(1)
        return self.enter(d_entered)

    def leave(self, k: Branches) -> Branches:
        if self.decay is None:
            return k
        return (k[0] * self.decay.out(0, k[0].shape[1]), *k[1:])

    def leave_grad(self, left: Branches, d_left: Branches) -> Branches:
        if self.d_total is not None:
            # Nothing decays from the last step to the end, and what it sends may be large beside all that does.
            met = (left[0] * d_left[0])[:, :-1].sum(2, dtype=torch.float64)
            self.d_total[:, :-1] -= met
            self.d_total[:, -1] += met.sum(1)
        return self.leave(d_left)

    def across(self) -> Float[Tensor, "n 1 1"] | None:
        """Return what multiplies a state over the whole chunk; None where nothing does."""
        return None if self.decay is None else self.decay.whole()

    def across_grad(self, s: Float[Tensor, "n k v"], d_after: Float[Tensor, "n k v"]) -> None:
        """Take in what a state met, given the gradient of the one after the chunk."""
        if self.decay is not None and self.d_total is not None:
            met = (s * d_after).sum((1, 2), dtype=torch.float64)
            self.d_total[:, -1] += met * self.decay.whole().flatten()

    def scores(self, rows: Branches, k: Branches) -> Float[Tensor, "n mc c"]:
        first, *rest = self._grams(rows, k)
        for gram in rest:
            first = first.mul_(gram)
        return first.mul_(self._mask(rows[0], k[0]))

    def scores_grad(
        self, rows: Branches, k: Branches, scores: Float[Tensor, "n mc c"], d_scores: Float[Tensor, "n mc c"]
    ) -> tuple[Branches, Branches]:
        if self.d_total is not None:
            product = scores * d_scores
            c = product.shape[2]
            product[:, :c].diagonal(0, 1, 2).zero_()  # nor from a step to itself
            self.d_total += product.sum(2, dtype=torch.float64).unflatten(1, (-1, c)).sum(1)
            self.d_total -= product.sum(1, dtype=torch.float64)
        d_gram = d_scores * self._mask(rows[0], k[0])
        if len(k) == 1:
            d_grams = [d_gram]
        else:
            first, second = self._grams(rows, k)
            d_grams = [second.mul_(d_gram), first.mul_(d_gram)]
        d_rows = tuple(torch.bmm(d, x) for d, x in zip(d_grams, k, strict=True))
        return d_rows, tuple(blocks.over_time(d.mT, x) for d, x in zip(d_grams, rows, strict=True))

    def log_decay_grad(self) -> tuple[Float[Tensor, "n c"], ...]:
        """Return the gradient of log_decay, from those of every exponent."""
        return () if self.d_total is None else (blocks.from_each_step(self.d_total.unsqueeze(2)).squeeze(2),)

    def _grams(self, rows: Branches, k: Branches) -> list[Float[Tensor, "n mc c"]]:
        return [torch.bmm(x, y.mT) for x, y in zip(rows, k, strict=True)]

    def _mask(self, rows: Tensor, k: Tensor) -> Float[Tensor, "_ mc c"]:
        """Return the decay from each column into each row, zero where the row does not come after."""
        c = k.shape[1]
        pairs = k.new_ones(1, c, c).tril() if self.decay is None else self.decay.pairs(0, c)
        return pairs if rows.shape[1] == c else torch.cat([pairs, pairs.tril(-1)], 1)
