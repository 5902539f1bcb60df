"""Scores under a decay a channel, Σ_c x_ic k_jc e^{G_ic − G_jc} for j ≤ i, such that no exponential is above one.

e^{G_i} e^{−G_j} overflows where a decay is strong. Instead a pair of steps meets where a boundary lies between
them, x_i e^{G_i − G_b} · k_j e^{G_b − G_j}: the chunk is cut into two halves, each half again, and so on, and a
pair is parted by exactly one of the cuts. So every score is a product of matrices, log₂ C of them, all of the
cuts of one size at once; a decay meets 2·K·log₂ C exponentials a step, where comparing steps in pairs takes K·C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


class Cut(NamedTuple):
    """All cuts of one size: rows after a boundary and keys before it, carried to it, and the decays that did it."""

    x: Float[Tensor, "p mh d"]
    k: Float[Tensor, "p h d"]
    carry: Float[Tensor, "n b 2 h d"]


class Tree:
    """Rows (N, m·C, d), m blocks of C steps, keys (N, C, d) and their cumulated base-2 decays (N, C, d), float64."""

    def __init__(self, rows: Float[Tensor, "n mc d"], k: Float[Tensor, "n c d"], total: Float[Tensor, "n c d"]) -> None:
        n, self.steps, d = k.shape
        self.size = 1 << (self.steps - 1).bit_length()
        self.rows = _fill(rows.reshape(n, -1, self.steps, d), self.size)
        self.k = _fill(k, self.size)
        # Past the end nothing decays, so that nothing there is larger than one either.
        past = total[:, -1:].expand(n, self.size - self.steps, d)
        self.total = torch.cat([total, past], 1) if self.size > self.steps else total
        self.cuts = [self._cut(1 << level) for level in range(self.size.bit_length() - 1)]

    def scores(self) -> Float[Tensor, "n mc c"]:
        """Return the scores, zero where a row comes before a key."""
        n, m = self.rows.shape[:2]
        whole = self.rows.new_zeros(n, m, self.size, self.size)
        whole.diagonal(0, 2, 3).copy_((self.rows * self.k.unsqueeze(1)).sum(3))
        for cut in self.cuts:
            part = _below(whole, cut.k.shape[1])
            part.copy_(torch.bmm(cut.x, cut.k.mT).view(part.shape))
        return whole[:, :, : self.steps, : self.steps].flatten(1, 2)

    def grad(
        self, d_scores: Float[Tensor, "n mc c"], d_total: Float[Tensor, "n c d"]
    ) -> tuple[Float[Tensor, "n mc d"], Float[Tensor, "n c d"]]:
        """Return the gradients of rows and keys, and add that of the cumulated decay, natural base, to `d_total`."""
        n, m, size, d = self.rows.shape
        grads = pad(d_scores.unflatten(1, (m, -1)), (0, size - self.steps, 0, size - self.steps))
        own = grads.diagonal(0, 2, 3).unsqueeze(3)
        d_rows, dk = own * self.k.unsqueeze(1), (own * self.rows).sum(1)
        d_exponent = torch.zeros_like(self.total)
        for cut in self.cuts:
            h = cut.k.shape[1]
            part = _below(grads, h).reshape(-1, m * h, h)
            dx, dy = torch.bmm(part, cut.k), torch.bmm(part.mT, cut.x)
            met_x = (cut.x * dx).view(n, -1, m, h, d).sum(2)
            met_k = (cut.k * dy).view(n, -1, h, d)
            halves = d_exponent.view(n, -1, 2, h, d)
            # Not `halves[...] += ...`, with which Python writes the result once more into its place.
            halves[:, :, 1].add_(met_x)
            halves[:, :, 0].sub_(met_k)
            halves[:, :, 0, -1].add_(met_k.sum(2, dtype=torch.float64) - met_x.sum(2, dtype=torch.float64))
            before, after = cut.carry.unbind(2)
            d_rows.view(n, m, -1, 2, h, d)[:, :, :, 1].addcmul_(
                dx.view(n, -1, m, h, d).transpose(1, 2), after.unsqueeze(1)
            )
            dk.view(n, -1, 2, h, d)[:, :, 0].addcmul_(dy.view(n, -1, h, d), before)
        d_total += d_exponent[:, : self.steps]
        return d_rows[:, :, : self.steps].flatten(1, 2), dk[:, : self.steps]

    def _cut(self, h: int) -> Cut:
        n, m, _, d = self.rows.shape
        halves = self.total.view(n, -1, 2, h, d)
        exponent = halves - halves[:, :, :1, -1:]
        exponent[:, :, 0].neg_()
        carry = exponent.exp2_().to(self.k.dtype)
        before, after = carry.unbind(2)
        x = self.rows.new_empty(n, halves.shape[1], m, h, d)  # in this order, which a plain product would not keep
        torch.mul(self.rows.view(n, m, -1, 2, h, d)[:, :, :, 1].transpose(1, 2), after.unsqueeze(2), out=x)
        k = self.k.view(n, -1, 2, h, d)[:, :, 0] * before
        return Cut(x.view(-1, m * h, d), k.view(-1, h, d), carry)


def _below(whole: Float[Tensor, "n m s s"], h: int) -> Float[Tensor, "n b m h h"]:
    """Return a view of the blocks of h rows and the h columns before them, below the diagonal."""
    n, m, size, _ = whole.shape
    b = size // (2 * h)
    return whole.view(n, m, b, 2, h, b, 2, h)[:, :, :, 1, :, :, 0].diagonal(0, 2, 4).permute(0, 4, 1, 2, 3)


def _fill(x: Tensor, size: int) -> Tensor:
    return pad(x, (0, 0, 0, size - x.shape[-2])) if x.shape[-2] < size else x
