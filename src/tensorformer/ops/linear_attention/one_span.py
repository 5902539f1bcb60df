"""A span of chunks at any of the twelve points, forward and backward, in float32 or better.

    U = (I + β·A_kk)⁻¹ β·(V − Φ̃(K) S₀)     (additive: U = V)     Y = Φ̃(Q) S₀ + A_qk U     S₁ = D S₀ + Φ̄(K)ᵀ U

for every chunk, whose state is S₀ before it and S₁ after it. A_qk and A_kk are the scores of queries and keys against
the keys before them, under the decay between the two; Φ̃ are features that the decay has carried from the start of
the chunk, Φ̄ to its end. Queries and keys meet keys and state in the same way, so they are rows of the same products.

Chunks and heads are laid flat, chunk by chunk. All that does not need the state is done for all chunks at once; only
S, what is read from it, and U go from chunk to chunk, and their gradients back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.ops.linear_attention import blocks
from tensorformer.ops.linear_attention.channel_decay import ChannelDecay
from tensorformer.ops.linear_attention.head_decay import HeadDecay


class Chunks(NamedTuple):
    """The operands of a span of `chunks` chunks, or their gradients. `beta` None is an additive update."""

    chunks: int
    q: tuple[Float[Tensor, "mn c _"], ...]
    k: tuple[Float[Tensor, "mn c _"], ...]
    v: Float[Tensor, "mn c v"]
    log_decay: tuple[Float[Tensor, "mn c *_"], ...]
    beta: Float[Tensor, "mn c"] | None

    def decay(self) -> HeadDecay | ChannelDecay:
        if self.log_decay and self.log_decay[0].ndim == 3:
            return ChannelDecay(self.log_decay, self.v.dtype)
        return HeadDecay(self.log_decay[0] if self.log_decay else None, self.v.dtype)

    def rows(self) -> tuple[Float[Tensor, "mn rc _"], ...]:
        """Return what reads: the queries, and after them, under the delta rule, the keys."""
        if self.beta is None:
            return self.q
        return tuple(torch.cat(pair, 1) for pair in zip(self.q, self.k, strict=True))


class _Ready(NamedTuple):
    """What needs no state."""

    rows: tuple[Float[Tensor, "mn rc _"], ...]
    scores: Float[Tensor, "mn rc c"]
    entered: tuple[Float[Tensor, "mn rc _"], ...]
    phi: Float[Tensor, "mn k rc"]
    left: tuple[Float[Tensor, "mn c _"], ...]
    sent: Float[Tensor, "mn k c"]
    across: Float[Tensor, "mn _ 1"] | None
    inverse: Float[Tensor, "mn c c"] | None


class _Carried(NamedTuple):
    """What does: the state before each chunk (None: zero) and after the last, and what each chunk met and wrote."""

    states: list[Float[Tensor, "n k v"] | None]
    after: Float[Tensor, "n k v"] | None
    met: list[Float[Tensor, "n rc v"] | None]
    u: Float[Tensor, "mn c v"]


def forward(
    x: Chunks, s: Float[Tensor, "n k v"] | None, final: bool
) -> tuple[Float[Tensor, "mn c v"], Float[Tensor, "n k v"] | None]:
    """Return the outputs and, if `final`, the state after the span, from the state before it (None: zero)."""
    ready, c = _prepare(x, x.decay()), x.v.shape[1]
    carried = _carry(x, ready, s, final)
    y = torch.bmm(ready.scores[:, :c], carried.u)
    for out, met in zip(y.chunk(x.chunks), carried.met, strict=True):
        if met is not None:
            out += met[:, :c]
    return y, carried.after


def backward(
    x: Chunks, s: Float[Tensor, "n k v"], dy: Float[Tensor, "mn c v"], ds: Float[Tensor, "n k v"] | None
) -> tuple[Chunks, Float[Tensor, "n k v"]]:
    """Return the gradients of the operands and of the state `s` before the span, from that after it (None: zero)."""
    decay, c = x.decay(), x.v.shape[1]
    ready = _prepare(x, decay)
    carried = _carry(x, ready, s, final=False)
    u, states = carried.u, torch.cat([state for state in carried.states if state is not None])
    d_states, d_solved, d_met = _carry_back(x, ready, dy, torch.zeros_like(s) if ds is None else ds)
    d_initial, d_after = d_states[0], torch.cat(d_states[1:])
    dv, d_beta = d_solved, None
    if x.beta is not None:
        dv = -d_met[:, c:]
        error = x.v - torch.cat([met for met in carried.met if met is not None])[:, c:]
        d_beta = (d_solved * error.sub_(torch.bmm(ready.scores[:, c:], u))).sum(2)
    d_rows, dk = decay.scores_grad(ready.rows, x.k, ready.scores, torch.bmm(d_met, u.mT))
    d_phi = torch.bmm(states, d_met.mT)
    _add(d_rows, decay.enter_grad(ready.entered, blocks.features_grad(d_phi, blocks.upright(ready.entered))))
    d_sent = torch.bmm(d_after, u.mT)
    _add(dk, decay.leave_grad(ready.left, blocks.features_grad(d_sent, blocks.upright(ready.left))))
    decay.across_grad(states, d_after)
    if x.beta is not None:
        _add(dk, tuple(d[:, c:] for d in d_rows))
    return Chunks(x.chunks, tuple(d[:, :c] for d in d_rows), dk, dv, decay.log_decay_grad(), d_beta), d_initial


def _prepare(x: Chunks, decay: HeadDecay | ChannelDecay) -> _Ready:
    rows, left, c = x.rows(), decay.leave(x.k), x.v.shape[1]
    scores, entered, inverse = decay.scores(rows, x.k), decay.enter(rows), None
    if x.beta is not None:
        unit = torch.eye(c, dtype=x.v.dtype, device=x.v.device).expand(x.v.shape[0], c, c)
        system = scores[:, c:] * x.beta.unsqueeze(2)
        inverse = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
    phi, sent = (blocks.features(blocks.upright(branches)) for branches in (entered, left))
    return _Ready(rows, scores, entered, phi, left, sent, decay.across(), inverse)


def _carry(x: Chunks, ready: _Ready, s: Tensor | None, final: bool) -> _Carried:
    """Carry the state `s` over the chunks; over the last one too if `final`."""
    c, n = x.v.shape[1], x.v.shape[0] // x.chunks
    states, met, u = [], [], x.v if x.beta is None else torch.empty_like(x.v)
    for i in range(x.chunks):
        own = slice(i * n, (i + 1) * n)
        states.append(s)
        met.append(None if s is None else torch.bmm(ready.phi[own].mT, s))
        if x.beta is not None and ready.inverse is not None:
            error = x.v[own] if s is None else x.v[own] - met[-1][:, c:]
            torch.bmm(ready.inverse[own], error * x.beta[own].unsqueeze(2), out=u[own])
        if final or i < x.chunks - 1:
            if s is None:
                s = torch.bmm(ready.sent[own], u[own])
            else:
                s = torch.baddbmm(s if ready.across is None else s * ready.across[own], ready.sent[own], u[own])
    return _Carried(states, s if final else None, met, u)


def _carry_back(
    x: Chunks, ready: _Ready, dy: Float[Tensor, "mn c v"], ds: Float[Tensor, "n k v"]
) -> tuple[list[Tensor], Float[Tensor, "mn c v"], Float[Tensor, "mn rc v"]]:
    """Carry the state's gradient back; return it before each chunk and after the last, and those of U and of Φ̃ S₀.

    Under the delta rule that of U is taken before β: of what the inverse was multiplied with.
    """
    c, n = x.v.shape[1], x.v.shape[0] // x.chunks
    du = blocks.over_time(ready.scores[:, :c].mT, dy)
    d_met = dy if x.beta is None else torch.cat([dy, torch.empty_like(dy)], 1)
    d_states = [ds]
    for i in reversed(range(x.chunks)):
        own = slice(i * n, (i + 1) * n)
        du[own].baddbmm_(ready.sent[own].mT, ds)
        if x.beta is not None and ready.inverse is not None:
            du[own] = blocks.over_time(ready.inverse[own].mT, du[own])
            torch.mul(du[own], -x.beta[own].unsqueeze(2), out=d_met[own, c:])
        before = blocks.over_time(ready.phi[own], d_met[own])
        ds = before.add_(ds) if ready.across is None else before.addcmul_(ds, ready.across[own])
        d_states.append(ds)
    return d_states[::-1], du, d_met


def _add(totals: tuple[Tensor, ...], terms: tuple[Tensor, ...]) -> None:
    for total, term in zip(totals, terms, strict=True):
        total.add_(term)
