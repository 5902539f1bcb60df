"""The additive update with one decay a head, or none, in chunks, on heads laid flat: q, k (N, T, K_r), v (N, T, V).

A step meets the steps of its own chunk through Gram matrices, a tile of rows at a time, and everything before
its chunk through the state. Nothing of size T·K or T·T ever exists. Backward recomputes, and walks the chunks
twice: forwards with the state, for the queries; then backwards with the state's gradient, for keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.ops.linear_attention import blocks
from tensorformer.ops.linear_attention.blocks import Decay
from tensorformer.ops.linear_attention.plan import CHUNK, TILE, pieces


class Operands(NamedTuple):
    """The operands of one call, or their gradients; heads laid flat."""

    q: tuple[Float[Tensor, "n t _"], ...]
    k: tuple[Float[Tensor, "n t _"], ...]
    v: Float[Tensor, "n t v"]
    log_decay: Float[Tensor, "n t"] | None
    state: Float[Tensor, "n k v"] | None

    @property
    def wide(self) -> torch.dtype:
        """The precision of the state and of sums."""
        return torch.promote_types(self.v.dtype, torch.float32)

    def steps(self, start: int, stop: int) -> Operands:
        """Return views of the steps start..stop; the state stays whole."""
        q, k = (tuple(x[:, start:stop] for x in branches) for branches in (self.q, self.k))
        decay = None if self.log_decay is None else self.log_decay[:, start:stop]
        return Operands(q, k, self.v[:, start:stop], decay, self.state)

    def decay(self) -> Decay | None:
        """Return the decays of these steps, taken as one chunk."""
        return None if self.log_decay is None else Decay(self.log_decay, self.v.dtype)


def forward(x: Operands, chunk: int, final: bool) -> tuple[Float[Tensor, "n t v"], Float[Tensor, "n k v"] | None]:
    """Return y and, if `final`, the state after the last step."""
    time = x.v.shape[1]
    y = torch.empty_like(x.v)
    s = None if x.state is None else x.state.clone()
    for first, last in pieces(time, chunk):
        part = x.steps(first, last)
        decay = part.decay()
        _outputs(y[:, first:last], part, decay, s)
        if final or last < time:
            s = _advance(s, part.k, part.v, decay, decay.out if decay else None, x.wide)
    if final and s is None:
        s = _empty_state(x)
    return y, s if final else None


def backward(
    x: Operands,
    dy: Float[Tensor, "n t v"],
    d_state: Float[Tensor, "n k v"] | None,
    chunk: int,
    state_needed: bool,
    decay_needed: bool,
) -> Operands:
    """Return the gradient of every operand from those of y and of the final state (None: zero).

    The gradient of a decay is a sum over the pairs of steps on its two sides, each pair counted where it is
    met: two states, a state and a step, two tiles, one tile. Every term is added, none is ever taken back,
    so a small gradient beside large ones keeps its accuracy. For it the state before every chunk is held, T/chunk
    of them, until this returns.
    """
    time = x.v.shape[1]
    grads = Operands(
        tuple(torch.zeros_like(b, dtype=x.wide) for b in x.q),
        tuple(torch.zeros_like(b, dtype=x.wide) for b in x.k),
        torch.zeros_like(x.v, dtype=x.wide),
        torch.zeros_like(x.log_decay, dtype=torch.float64) if decay_needed and x.log_decay is not None else None,
        None,
    )
    s = None if x.state is None else x.state.clone()
    states: list[Tensor | None] = []
    for first, last in pieces(time, chunk):
        part = x.steps(first, last)
        decay = part.decay()
        _within_grad(grads.steps(first, last), part, dy[:, first:last], decay)
        if s is not None:
            _queries_grad(grads.steps(first, last), part, dy[:, first:last], decay, s)
        if grads.log_decay is not None:
            states.append(None if s is None else s.clone())
        if last < time:
            s = _advance(s, part.k, part.v, decay, decay.out if decay else None, x.wide)
    ds = None if d_state is None else d_state.to(x.wide, copy=True)
    for first, last in reversed(pieces(time, chunk)):
        part = x.steps(first, last)
        decay = part.decay()
        if ds is not None:
            _keys_grad(grads.steps(first, last), part, decay, ds)
            if grads.log_decay is not None and decay is not None and (s := states.pop()) is not None:
                whole = (s * ds).sum((1, 2)).unsqueeze(1) * decay.whole().squeeze(2)
                grads.log_decay[:, first:last].add_(whole)
        elif states:
            states.pop()
        if first > 0 or state_needed:
            ds = _advance(ds, part.q, dy[:, first:last], decay, decay.into if decay else None, x.wide)
    if state_needed and ds is None:
        ds = _empty_state(x)
    return grads._replace(state=ds if state_needed else None)


def _outputs(y: Float[Tensor, "n c v"], x: Operands, decay: Decay | None, s: Tensor | None) -> None:
    """Write the outputs of one chunk that starts from the state `s`."""
    for start, stop in pieces(y.shape[1], TILE):
        tile = x.steps(start, stop)
        if decay is None:
            near = x.steps(0, stop)
            out = blocks.attend(tile.q, near.k, near.v, True)
        else:
            out = blocks.attend(tile.q, tile.k, tile.v, decay.pairs(start, stop))
            if start:
                past = x.steps(0, start)
                met = blocks.attend(tile.q, past.k, past.v * decay.columns(start), False)
                out.add_(met.mul_(decay.rows(start, stop)))
        y[:, start:stop] = out
    if s is not None:
        s = s.to(x.v.dtype).mT
        for start, stop in pieces(y.shape[1], CHUNK):
            met = torch.bmm(s, blocks.features(x.steps(start, stop).q)).mT
            y[:, start:stop].add_(met if decay is None else met.mul_(decay.into(start, stop)))


def _advance(
    s: Tensor | None,
    keys: tuple[Tensor, ...],
    values: Float[Tensor, "n c v"],
    decay: Decay | None,
    scale: Callable[[int, int], Tensor] | None,
    wide: torch.dtype,
) -> Float[Tensor, "n k v"]:
    """Return e^{G} s + Σ φ(key) (scale · value)ᵀ over one chunk, overwriting `s`.

    With keys, values and the decay out of each step it carries the state forwards; with queries, gradients of
    y and the decay into each step it carries the state's gradient backwards.
    """
    if s is not None and decay is not None:
        s.mul_(decay.whole())
    for start, stop in pieces(values.shape[1], CHUNK):
        phi = blocks.features(tuple(x[:, start:stop] for x in keys))
        v = values[:, start:stop]
        if scale is not None:
            v = (v * scale(start, stop)).to(v.dtype)
        if s is None:
            s = torch.bmm(phi, v).to(wide)
        else:
            s = torch.baddbmm(s, phi, v, out=s) if s.dtype == v.dtype else s.add_(torch.bmm(phi, v))
    assert s is not None
    return s


def _within_grad(grads: Operands, x: Operands, dy: Float[Tensor, "n c v"], decay: Decay | None) -> None:
    """Add the gradients of what the steps of one chunk send one another."""
    for start, stop in pieces(dy.shape[1], TILE):
        tile, into, d_out = x.steps(start, stop), grads.steps(start, stop), dy[:, start:stop]
        if decay is None:
            near = x.steps(0, stop)
            dq, dk, dv, _ = blocks.attend_grad(tile.q, near.k, near.v, d_out, True)
            _add(into.q, dq)
            _add(grads.steps(0, stop).k, dk)
            grads.v[:, :stop].add_(dv)
            continue
        mask = decay.pairs(start, stop)
        dq, dk, dv, product = blocks.attend_grad(
            tile.q, tile.k, tile.v, d_out, mask, with_product=grads.log_decay is not None
        )
        _add(into.q, dq)
        _add(into.k, dk)
        into.v.add_(dv)
        if into.log_decay is not None and product is not None:
            into.log_decay.add_(blocks.decays_between(product))
        if start:
            past, columns = x.steps(0, start), decay.columns(start)
            values = past.v * columns
            dq, dk, dv, _ = blocks.attend_grad(tile.q, past.k, values, d_out * decay.rows(start, stop), False)
            _add(into.q, dq)
            _add(grads.steps(0, start).k, dk)
            grads.v[:, :start].add_(dv * columns)
            if grads.log_decay is not None:
                grads.log_decay[:, :start].add_(blocks.decays_after(values, dv))
                grads.log_decay[:, start:stop].add_(blocks.decays_before(tile.q[0], dq[0]))


def _queries_grad(
    grads: Operands, x: Operands, dy: Float[Tensor, "n c v"], decay: Decay | None, s: Float[Tensor, "n k v"]
) -> None:
    """Add the gradients of what the steps of one chunk read from the state `s` before it."""
    s = s.to(x.v.dtype)
    met = []
    for start, stop in pieces(dy.shape[1], CHUNK):
        tile, d_out = x.steps(start, stop), dy[:, start:stop]
        if decay is not None:
            d_out = (d_out * decay.into(start, stop)).to(d_out.dtype)
        dq = blocks.features_grad(torch.bmm(s, d_out.mT), tile.q)
        _add(grads.steps(start, stop).q, dq)
        met.append(dq[0])
    if grads.log_decay is not None:
        grads.log_decay.add_(blocks.decays_before(x.q[0], torch.cat(met, 1)))


def _keys_grad(grads: Operands, x: Operands, decay: Decay | None, ds: Float[Tensor, "n k v"]) -> None:
    """Add the gradients of what the steps of one chunk leave in the state after it, given its gradient."""
    ds = ds.to(x.v.dtype)
    met = []
    for start, stop in pieces(x.v.shape[1], CHUNK):
        tile, into = x.steps(start, stop), grads.steps(start, stop)
        dv = torch.bmm(ds.mT, blocks.features(tile.k)).mT
        values = tile.v
        if decay is not None:
            out = decay.out(start, stop)
            values, dv = (values * out).to(values.dtype), dv * out
        dk = blocks.features_grad(torch.bmm(ds, values.mT), tile.k)
        _add(into.k, dk)
        into.v.add_(dv)
        met.append(dk[0])
    if grads.log_decay is not None:
        grads.log_decay.add_(blocks.decays_after(x.k[0], torch.cat(met, 1)))


def _add(totals: tuple[Tensor, ...], terms: tuple[Tensor, ...]) -> None:
    for total, term in zip(totals, terms, strict=True):
        total.add_(term)


def _empty_state(x: Operands) -> Float[Tensor, "n k v"]:
    width = math.prod(branch.shape[-1] for branch in x.k)
    return x.v.new_zeros(x.v.shape[0], width, x.v.shape[2], dtype=x.wide)
