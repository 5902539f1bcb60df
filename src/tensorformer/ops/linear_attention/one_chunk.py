"""One chunk of any of the twelve points, forward and backward, on heads laid flat, in float32 or better.

    U = (I + β·A_kk)⁻¹ β·(V − Φ̃(K) S₀)     (additive: U = V)     Y = Φ̃(Q) S₀ + A_qk U     S₁ = D S₀ + Φ̄(K)ᵀ U

A_qk and A_kk are the scores of queries and keys against the keys before them, under the decay between the two;
Φ̃ are features that the decay has carried from the start of the chunk, Φ̄ to its end. Queries and keys meet
keys and state in the same way, so they are rows of the same products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.ops.linear_attention import blocks
from tensorformer.ops.linear_attention.channel_decay import ChannelDecay
from tensorformer.ops.linear_attention.head_decay import HeadDecay


class Chunk(NamedTuple):
    """The operands of one chunk, or their gradients. `beta` None is an additive update."""

    q: tuple[Float[Tensor, "n c _"], ...]
    k: tuple[Float[Tensor, "n c _"], ...]
    v: Float[Tensor, "n c v"]
    log_decay: tuple[Float[Tensor, "n c *_"], ...]
    beta: Float[Tensor, "n c"] | None

    def decay(self) -> HeadDecay | ChannelDecay:
        if self.log_decay and self.log_decay[0].ndim == 3:
            return ChannelDecay(self.log_decay, self.v.dtype)
        return HeadDecay(self.log_decay[0] if self.log_decay else None, self.v.dtype)

    def rows(self) -> tuple[Float[Tensor, "n mc _"], ...]:
        """Return what reads: the queries, and after them, under the delta rule, the keys."""
        if self.beta is None:
            return self.q
        return tuple(torch.cat(pair, 1) for pair in zip(self.q, self.k, strict=True))


class _Solved(NamedTuple):
    """What forward and backward both need: see the head of this file."""

    scores: Float[Tensor, "n mc c"]
    entered: tuple[Float[Tensor, "n mc _"], ...]
    phi: Float[Tensor, "n k mc"] | None
    met: Float[Tensor, "n mc v"] | None
    inverse: Float[Tensor, "n c c"] | None
    error: Float[Tensor, "n c v"] | None
    u: Float[Tensor, "n c v"]


def forward(
    x: Chunk, s: Float[Tensor, "n k v"] | None, final: bool
) -> tuple[Float[Tensor, "n c v"], Float[Tensor, "n k v"] | None]:
    """Return the outputs and, if `final`, the state after the chunk, from the state before it (None: zero)."""
    decay, c = x.decay(), x.v.shape[1]
    solved = _solve(x, decay, x.rows(), s)
    y = torch.bmm(solved.scores[:, :c], solved.u)
    if solved.met is not None:
        y += solved.met[:, :c]
    return y, _advance(x, decay, solved.u, s) if final else None


def advance(x: Chunk, s: Float[Tensor, "n k v"]) -> Float[Tensor, "n k v"]:
    """Return the state after the chunk alone."""
    decay = x.decay()
    return _advance(x, decay, _solve(x, decay, x.rows(), s).u, s)


def backward(
    x: Chunk, s: Float[Tensor, "n k v"], dy: Float[Tensor, "n c v"], ds: Float[Tensor, "n k v"] | None
) -> tuple[Chunk, Float[Tensor, "n k v"]]:
    """Return the gradients of the chunk's operands and of the state `s` before it."""
    decay, rows, c = x.decay(), x.rows(), x.v.shape[1]
    solved = _solve(x, decay, rows, s)
    u, left = solved.u, decay.leave(x.k)
    sent = blocks.upright(left)
    du = blocks.over_time(solved.scores[:, :c].mT, dy)
    if ds is not None:
        du = torch.baddbmm(du, blocks.features(sent).mT, ds)
    d_met, dv, d_beta = dy, du, None
    if x.beta is not None:
        assert solved.inverse is not None
        assert solved.error is not None
        d_solved = blocks.over_time(solved.inverse.mT, du)
        dv = d_solved * x.beta.unsqueeze(2)
        d_beta = (d_solved * (solved.error - torch.bmm(solved.scores[:, c:], u))).sum(2)
        d_met = torch.cat([dy, -dv], 1)
    d_scores = torch.bmm(d_met, u.mT)
    d_rows, dk = decay.scores_grad(rows, x.k, solved.scores, d_scores)
    assert solved.phi is not None
    d_phi = torch.bmm(s, d_met.mT)
    d_rows = _sum(d_rows, decay.enter_grad(solved.entered, blocks.features_grad(d_phi, blocks.upright(solved.entered))))
    d_state = blocks.over_time(solved.phi, d_met)
    if ds is not None:
        d_left = blocks.features_grad(torch.bmm(ds, u.mT), sent)
        dk = _sum(dk, decay.leave_grad(left, d_left))
        d_state += decay.across_grad(s, ds)
    dq = tuple(d[:, :c] for d in d_rows)
    if x.beta is not None:
        dk = _sum(dk, tuple(d[:, c:] for d in d_rows))
    return Chunk(dq, dk, dv, decay.log_decay_grad(), d_beta), d_state


def _solve(x: Chunk, decay: HeadDecay | ChannelDecay, rows: tuple[Tensor, ...], s: Tensor | None) -> _Solved:
    scores = decay.scores(rows, x.k)
    entered, phi, met = (), None, None
    if s is not None:
        entered = decay.enter(rows)
        phi = blocks.features(blocks.upright(entered))
        met = torch.bmm(phi.mT, s)
    if x.beta is None:
        return _Solved(scores, entered, phi, met, None, None, x.v)
    c, beta = x.v.shape[1], x.beta.unsqueeze(2)
    error = x.v if met is None else x.v - met[:, c:]
    unit = torch.eye(c, dtype=x.v.dtype, device=x.v.device).expand(x.v.shape[0], c, c)
    inverse = torch.linalg.solve_triangular(scores[:, c:] * beta, unit, upper=False, unitriangular=True)
    return _Solved(scores, entered, phi, met, inverse, error, torch.bmm(inverse, error * beta))


def _advance(x: Chunk, decay: HeadDecay | ChannelDecay, u: Tensor, s: Tensor | None) -> Float[Tensor, "n k v"]:
    left = blocks.features(blocks.upright(decay.leave(x.k)))
    return torch.bmm(left, u) if s is None else torch.baddbmm(decay.across(s), left, u)


def _sum(totals: tuple[Tensor, ...], terms: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(total + term for total, term in zip(totals, terms, strict=True))
