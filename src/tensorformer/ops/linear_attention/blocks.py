"""The pieces of the chunked form, on heads laid flat: features, Gram blocks, and decay inside a chunk."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

LOG2_E = math.log2(math.e)
# 2 to this power is 0 in every dtype; clamping there keeps differences of cumulated −inf from being NaN.
# The sums grow with every reset: sixteen of them in one chunk leave float64 some 1e-12, which nothing narrower sees.
FORGOTTEN = -1100.0


def upright(x: tuple[Tensor, ...]) -> tuple[Float[Tensor, "n _ t"], ...]:
    """Return the branches with time last: a view of a single one, copies of two.

    Time is the long axis; with it innermost the products of two branches run at the speed of memory.
    """
    return (x[0].mT,) if len(x) == 1 else tuple(branch.mT.contiguous() for branch in x)


def features(x: tuple[Float[Tensor, "n _ t"], ...]) -> Float[Tensor, "n k t"]:
    """Return φ(x) of upright branches: the branch itself, or the row-major product of two."""
    return x[0] if len(x) == 1 else (x[0].unsqueeze(2) * x[1].unsqueeze(1)).flatten(1, 2)


def features_grad(
    d_phi: Float[Tensor, "n k t"], x: tuple[Float[Tensor, "n _ t"], ...]
) -> tuple[Float[Tensor, "n t _"], ...]:
    """Return the gradient of every branch, time first, from that of φ(x), which is overwritten."""
    if len(x) == 1:
        return (d_phi.mT,)
    first, second = x
    d_phi = d_phi.unflatten(1, (first.shape[1], second.shape[1]))
    d_first = (d_phi * second.unsqueeze(1)).sum(2)
    return d_first.mT, d_phi.mul_(first.unsqueeze(2)).sum(1).mT


def over_time(x: Float[Tensor, "n i t"], y: Float[Tensor, "n t j"], run: int = 16) -> Float[Tensor, "n i j"]:
    """Return x y, summed in short runs of the axis between them, the last run first.

    A product adds one term after another, and where decays are at work the first are the largest: each of the
    many small ones that follow costs a rounding of the whole. Chains of such sums miss the budget of float32.
    """
    cuts = range(0, x.shape[2], run)
    total = torch.bmm(x[:, :, cuts[-1] :], y[:, cuts[-1] :])
    for start in reversed(cuts[:-1]):
        total.baddbmm_(x[:, :, start : start + run], y[:, start : start + run])
    return total


def _mask(gram: Float[Tensor, "n i j"], mask: Float[Tensor, "n i i"] | bool) -> None:
    """Mask, in place, the block in which rows meet the keys of their own steps: the last columns.

    `False`: there is no such block, every key is before every row. `True`: causal. A tensor: multiply.
    """
    if mask is False:
        return
    own = gram[:, :, gram.shape[2] - gram.shape[1] :]
    own.tril_() if mask is True else own.mul_(mask)


def attend(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Float[Tensor, "n j v"], mask: Tensor | bool
) -> Float[Tensor, "n i v"]:
    """Return (∏_r q_r k_rᵀ, masked) v."""
    gram = torch.bmm(q[0], k[0].mT)
    if len(q) == 2:
        gram.mul_(torch.bmm(q[1], k[1].mT))
    _mask(gram, mask)
    return torch.bmm(gram, v)


def attend_grad(
    q: tuple[Tensor, ...],
    k: tuple[Tensor, ...],
    v: Float[Tensor, "n j v"],
    dy: Float[Tensor, "n i v"],
    mask: Tensor | bool,
    with_product: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor | None]:
    """Return the gradients of q, k and v from that of `attend`, whose Gram matrices are built again.

    With `with_product` also gram ∘ its gradient, from which the gradient of a decay in `mask` follows.
    """
    grams = [torch.bmm(x, y.mT) for x, y in zip(q, k, strict=True)]
    d_gram = torch.bmm(dy, v.mT)
    _mask(d_gram, mask)
    gram = grams[0] * grams[1] if len(grams) == 2 else grams[0]
    product = gram * d_gram if with_product else None
    _mask(gram, mask)
    dv = torch.bmm(gram.mT, dy)
    d_grams = [grams[1].mul_(d_gram), grams[0].mul_(d_gram)] if len(grams) == 2 else [d_gram]
    dq = tuple(torch.bmm(d, x) for d, x in zip(d_grams, k, strict=True))
    dk = tuple(torch.bmm(d.mT, x) for d, x in zip(d_grams, q, strict=True))
    return dq, dk, dv, product


class Decay:
    """Products of decays between two places of one chunk, none above one where log_decay ≤ 0.

    Differences are taken of a float64 cumulated sum and only then exponentiated, so neither a long chunk nor
    a strong decay costs accuracy, and nothing overflows: pairs of one tile are masked before the exponential,
    a pair further apart is the product of two decays that meet at the edge of the tile. Logarithms are of
    base 2: torch's exp on a CPU takes up to fifty times as long where results are tiny, its exp2 does not.
    """

    def __init__(self, log_decay: Float[Tensor, "n c"], dtype: torch.dtype) -> None:
        self.total = (log_decay.double() * LOG2_E).clamp_min_(FORGOTTEN).cumsum(1).unsqueeze(2)
        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)

    def into(self, start: int, stop: int) -> Float[Tensor, "n t 1"]:
        """From the start of the chunk into each of the steps start..stop."""
        return self.total[:, start:stop].exp2().to(self.wide)

    def out(self, start: int, stop: int) -> Float[Tensor, "n t 1"]:
        """From each of the steps start..stop to the end of the chunk."""
        return (self.total[:, -1:] - self.total[:, start:stop]).exp2().to(self.wide)

    def whole(self) -> Float[Tensor, "n 1 1"]:
        """Over the whole chunk."""
        return self.total[:, -1:].exp2().to(self.wide)

    def rows(self, start: int, stop: int) -> Float[Tensor, "n t 1"]:
        """From the step before the tile start..stop into each of its steps."""
        return (self.total[:, start:stop] - self.total[:, start - 1 : start]).exp2().to(self.dtype)

    def columns(self, start: int) -> Float[Tensor, "n t 1"]:
        """From each step before the tile that begins at `start` to the last of them."""
        return (self.total[:, start - 1 : start] - self.total[:, :start]).exp2().to(self.dtype)

    def pairs(self, start: int, stop: int) -> Float[Tensor, "n t t"]:
        """From each step of the tile (column) to each that is not before it (row); zero elsewhere."""
        g = self.total[:, start:stop]
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=g.device).triu_(1)
        exponent = (g - g.mT).masked_fill_(later, -torch.inf)
        # Rounding an exponent of −29 to float32 costs exp2 five units in the last place: too many for float32.
        return (exponent.float() if self.dtype == torch.bfloat16 else exponent).exp2_().to(self.dtype)


def from_each_step(x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t d"]:
    """Return Σ_{i≥t} x_i: what a decay is given by every cumulated one that holds it."""
    return torch.matmul(x.new_ones(x.shape[1], x.shape[1]).triu_(), x)


def decays_between(product: Float[Tensor, "n t t"]) -> Float[Tensor, "n t"]:
    """Return Σ_{i≥t} Σ_{j<t} product_ij: a pair counts for every decay between its two steps."""
    wide = torch.promote_types(product.dtype, torch.float32)
    before = product.cumsum(2, dtype=wide)[:, :, :-1].tril_(-1)
    return pad(before.sum(1), (1, 0))


def decays_before(x: Float[Tensor, "n t d"], dx: Float[Tensor, "n t d"]) -> Float[Tensor, "n t"]:
    """Return Σ_{i≥t} x_i·dx_i: what step i meets through its queries counts for every decay up to it."""
    return _met(x, dx).flip(1).cumsum(1).flip(1)


def decays_after(x: Float[Tensor, "n t d"], dx: Float[Tensor, "n t d"]) -> Float[Tensor, "n t"]:
    """Return Σ_{j<t} x_j·dx_j: what step j sends on through its keys counts for every decay after it."""
    return pad(_met(x, dx).cumsum(1)[:, :-1], (1, 0))


def _met(x: Float[Tensor, "n t d"], dx: Float[Tensor, "n t d"]) -> Float[Tensor, "n t"]:
    return (x * dx).sum(2, dtype=torch.promote_types(x.dtype, torch.float32))
