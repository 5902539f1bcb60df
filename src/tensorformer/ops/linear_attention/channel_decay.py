"""One decay a channel inside one chunk: it multiplies every channel of rows and keys from inside the products."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.ops.linear_attention import blocks
from tensorformer.ops.linear_attention.blocks import FORGOTTEN, LOG2_E
from tensorformer.ops.linear_attention.tree import Tree

Branches = tuple[Tensor, ...]


class ChannelDecay:
    """What `log_decay`, one (N, C, K_r) a branch, does to a chunk; the same face as `HeadDecay`."""

    def __init__(self, log_decay: Branches, dtype: torch.dtype) -> None:
        self.totals = [(x.double() * LOG2_E).clamp_min_(FORGOTTEN).cumsum(1) for x in log_decay]
        self.into = [total.exp2().to(dtype) for total in self.totals]
        self.out = [(total[:, -1:] - total).exp2_().to(dtype) for total in self.totals]
        self.trees: list[Tree] = []

    @functools.cached_property
    def d_totals(self) -> list[Float[Tensor, "n c _"]]:
        """The gradients of `totals`, natural base, as far as they have been taken in: forward needs none."""
        return [torch.zeros_like(x) for x in self.totals]

    def enter(self, rows: Branches) -> Branches:
        return tuple(_times(x, into) for x, into in zip(rows, self.into, strict=True))

    def enter_grad(self, entered: Branches, d_entered: Branches) -> Branches:
        for d_total, x, dx in zip(self.d_totals, entered, d_entered, strict=True):
            d_total += (x * dx).unflatten(1, (-1, d_total.shape[1])).sum(1)
        return self.enter(d_entered)

    def leave(self, k: Branches) -> Branches:
        return tuple(x * out for x, out in zip(k, self.out, strict=True))

    def leave_grad(self, left: Branches, d_left: Branches) -> Branches:
        for d_total, x, dx in zip(self.d_totals, left, d_left, strict=True):
            met = (x * dx)[:, :-1].double()  # nothing decays from the last step to the end, and it may be large
            d_total[:, :-1].sub_(met)
            d_total[:, -1].add_(met.sum(1))
        return self.leave(d_left)

    def across(self) -> Float[Tensor, "n k 1"]:
        return blocks.features(tuple(into[:, -1:].mT for into in self.into))

    def across_grad(self, s: Float[Tensor, "n k v"], d_after: Float[Tensor, "n k v"]) -> None:
        met = (s * d_after).sum(2, dtype=torch.float64) * self.across().squeeze(2)
        if len(self.totals) == 1:
            self.d_totals[0][:, -1] += met
        else:
            met = met.unflatten(1, (self.totals[0].shape[2], self.totals[1].shape[2]))
            self.d_totals[0][:, -1] += met.sum(2)
            self.d_totals[1][:, -1] += met.sum(1)

    def scores(self, rows: Branches, k: Branches) -> Float[Tensor, "n mc c"]:
        self.trees = [Tree(x, y, total) for x, y, total in zip(rows, k, self.totals, strict=True)]
        grams = [tree.scores() for tree in self.trees]
        return _not_itself(grams[0] if len(grams) == 1 else grams[0].mul_(grams[1]))

    def scores_grad(
        self, rows: Branches, k: Branches, scores: Float[Tensor, "n mc c"], d_scores: Float[Tensor, "n mc c"]
    ) -> tuple[Branches, Branches]:
        d_gram = _not_itself(d_scores)
        if len(k) == 1:
            d_grams = [d_gram]
        else:
            first, second = (tree.scores() for tree in self.trees)
            d_grams = [second.mul_(d_gram), first.mul_(d_gram)]
        found = [tree.grad(d, total) for tree, d, total in zip(self.trees, d_grams, self.d_totals, strict=True)]
        return tuple(d_rows for d_rows, _ in found), tuple(dk for _, dk in found)

    def log_decay_grad(self) -> tuple[Float[Tensor, "n c _"], ...]:
        return tuple(blocks.from_each_step(d) for d in self.d_totals)


def _times(rows: Float[Tensor, "n mc d"], decay: Float[Tensor, "n c d"]) -> Float[Tensor, "n mc d"]:
    """Multiply every block of rows by the decay of its steps."""
    return (rows.unflatten(1, (-1, decay.shape[1])) * decay.unsqueeze(1)).flatten(1, 2)


def _not_itself(scores: Float[Tensor, "n mc c"]) -> Float[Tensor, "n mc c"]:
    """Leave out, in place, what a key would score with itself; a query does meet the key of its own step."""
    c = scores.shape[2]
    scores[:, c:].diagonal(0, 1, 2).zero_()
    return scores
