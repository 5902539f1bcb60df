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

    def cut(self, chunk: int) -> list[Operands]:
        """Return views of the chunks, the last one shorter; the state stays whole."""
        q, k = (zip(*(_split(x, chunk) for x in branches), strict=True) for branches in (self.q, self.k))
        v = _split(self.v, chunk)
        decay = [None] * len(v) if self.log_decay is None else _split(self.log_decay, chunk)
        return [Operands(*parts, self.state) for parts in zip(q, k, v, decay, strict=True)]

    def decay(self) -> Decay | None:
        """Return the decays of these steps, taken as one chunk."""
        return None if self.log_decay is None else Decay(self.log_decay, self.v.dtype)


def forward(y: Float[Tensor, "n t v"], x: Operands, chunk: int, final: bool) -> Float[Tensor, "n k v"] | None:
    """Write all of y; return, if `final`, the state after the last step."""
    s = None if x.state is None else x.state.clone()
    parts = x.cut(chunk)
    for i, (part, out) in enumerate(zip(parts, _split(y, chunk), strict=True)):
        decay = part.decay()
        _outputs(out, part, decay, s)
        if final or i < len(parts) - 1:
            s = _advance(s, part.k, part.v, decay, decay.out if decay else None, x.wide)
    if final and s is None:
        s = _empty_state(x)
    return s if final else None


def backward(
    grads: Operands,
    x: Operands,
    dy: Float[Tensor, "n t v"],
    d_state: Float[Tensor, "n k v"] | None,
    chunk: int,
    state_needed: bool,
) -> Float[Tensor, "n k v"] | None:
    """Write every gradient from those of y and of the final state (None: zero); return that of the initial state.

    The gradient of a decay is a sum over the pairs of steps on its two sides, each pair counted where it is
    met: two states, a state and a step, two tiles, one tile. Every term is added, none is ever taken back,
    so a small gradient beside large ones keeps its accuracy. For it the state before every chunk is held, T/chunk
    of them, until this returns.

    Args:
        grads: where to write; without `log_decay` if its gradient is not needed. Its `state` is not looked at.
        state_needed: whether the gradient of the initial state is returned.
    """
    s = None if x.state is None else x.state.clone()
    states: list[Tensor | None] = []
    chunks = list(zip(x.cut(chunk), grads.cut(chunk), _split(dy, chunk), strict=True))
    for i, (part, into, d_out) in enumerate(chunks):
        decay = part.decay()
        _within_grad(into, part, d_out, decay)
        if s is not None:
            _queries_grad(into, part, d_out, decay, s)
        if grads.log_decay is not None:
            states.append(None if s is None else s.clone())
        if i < len(chunks) - 1:
            s = _advance(s, part.k, part.v, decay, decay.out if decay else None, x.wide)
    ds = None if d_state is None else d_state.to(x.wide, copy=True)
    for i, (part, into, d_out) in reversed(list(enumerate(chunks))):
        decay = part.decay()
        if ds is not None:
            _keys_grad(into, part, decay, ds)
            if into.log_decay is not None and decay is not None and (s := states[i]) is not None:
                into.log_decay.add_((s * ds).sum((1, 2)).unsqueeze(1) * decay.whole().squeeze(2))
        if i > 0 or state_needed:
            ds = _advance(ds, part.q, d_out, decay, decay.into if decay else None, x.wide)
    if state_needed and ds is None:
        ds = _empty_state(x)
    return ds if state_needed else None


def _outputs(y: Float[Tensor, "n c v"], x: Operands, decay: Decay | None, s: Tensor | None) -> None:
    """Write the outputs of one chunk that starts from the state `s`."""
    for start, stop in pieces(y.shape[1], TILE):
        q, out = _steps(x.q, start, stop), y[:, start:stop]
        if decay is None:
            out.copy_(blocks.attend(q, _steps(x.k, 0, stop), x.v[:, :stop], True))
            continue
        out.copy_(blocks.attend(q, _steps(x.k, start, stop), x.v[:, start:stop], decay.pairs(start, stop)))
        if start:
            past = x.v[:, :start] * decay.columns(start)
            out.add_(blocks.attend(q, _steps(x.k, 0, start), past, False).mul_(decay.rows(start, stop)))
    if s is not None:
        s = s.to(x.v.dtype).mT
        for start, stop in pieces(y.shape[1], CHUNK):
            met = torch.bmm(s, blocks.features(blocks.upright(_steps(x.q, start, stop)))).mT
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
        phi = blocks.features(blocks.upright(_steps(keys, start, stop)))
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
    """Write the gradients of what the steps of one chunk send one another."""
    if decay is None:
        _tiles_grad(grads, x, dy)
        return
    for start, stop in pieces(dy.shape[1], TILE):
        q, k, d_out = _steps(x.q, start, stop), _steps(x.k, start, stop), dy[:, start:stop]
        mask, with_product = decay.pairs(start, stop), grads.log_decay is not None
        dq, dk, dv, product = blocks.attend_grad(q, k, x.v[:, start:stop], d_out, mask, with_product)
        _copy(_steps(grads.q, start, stop), dq)
        _copy(_steps(grads.k, start, stop), dk)
        grads.v[:, start:stop].copy_(dv)
        if grads.log_decay is not None and product is not None:
            grads.log_decay[:, start:stop].copy_(blocks.decays_between(product))
        if start:
            columns = decay.columns(start)
            k, values = _steps(x.k, 0, start), x.v[:, :start] * columns
            dq, dk, dv, _ = blocks.attend_grad(q, k, values, d_out * decay.rows(start, stop), False)
            _add(_steps(grads.q, start, stop), dq)
            _add(_steps(grads.k, 0, start), dk)
            grads.v[:, :start].add_(dv * columns)
            if grads.log_decay is not None:
                grads.log_decay[:, :start].add_(blocks.decays_after(values, dv))
                grads.log_decay[:, start:stop].add_(blocks.decays_before(q[0], dq[0]))


def _tiles_grad(grads: Operands, x: Operands, dy: Float[Tensor, "n c v"]) -> None:
    """Write the same where nothing decays: the last tile meets all keys, every earlier one some of them."""
    for start, stop in reversed(pieces(dy.shape[1], TILE)):
        dq, dk, dv, _ = blocks.attend_grad(
            _steps(x.q, start, stop), _steps(x.k, 0, stop), x.v[:, :stop], dy[:, start:stop], True
        )
        _copy(_steps(grads.q, start, stop), dq)
        if stop == dy.shape[1]:
            _copy(grads.k, dk)
            grads.v.copy_(dv)
        else:
            _add(_steps(grads.k, 0, stop), dk)
            grads.v[:, :stop].add_(dv)


def _queries_grad(
    grads: Operands, x: Operands, dy: Float[Tensor, "n c v"], decay: Decay | None, s: Float[Tensor, "n k v"]
) -> None:
    """Add the gradients of what the steps of one chunk read from the state `s` before it."""
    s = s.to(x.v.dtype)
    met = []
    for start, stop in pieces(dy.shape[1], CHUNK):
        q, d_out = blocks.upright(_steps(x.q, start, stop)), dy[:, start:stop]
        if decay is not None:
            d_out = (d_out * decay.into(start, stop)).to(d_out.dtype)
        dq = blocks.features_grad(torch.bmm(s, d_out.mT), q)
        _add(_steps(grads.q, start, stop), dq)
        met.append(dq[0])
    if grads.log_decay is not None:
        grads.log_decay.add_(blocks.decays_before(x.q[0], torch.cat(met, 1)))


def _keys_grad(grads: Operands, x: Operands, decay: Decay | None, ds: Float[Tensor, "n k v"]) -> None:
    """Add the gradients of what the steps of one chunk leave in the state after it, given its gradient."""
    ds = ds.to(x.v.dtype)
    met = []
    for start, stop in pieces(x.v.shape[1], CHUNK):
        k, values = blocks.upright(_steps(x.k, start, stop)), x.v[:, start:stop]
        dv = torch.bmm(ds.mT, blocks.features(k)).mT
        if decay is not None:
            out = decay.out(start, stop)
            values, dv = (values * out).to(values.dtype), dv * out
        dk = blocks.features_grad(torch.bmm(ds, values.mT), k)
        _add(_steps(grads.k, start, stop), dk)
        grads.v[:, start:stop].add_(dv)
        met.append(dk[0])
    if grads.log_decay is not None:
        grads.log_decay.add_(blocks.decays_after(x.k[0], torch.cat(met, 1)))


def _split(x: Float[Tensor, "n t *_"], chunk: int) -> tuple[Tensor, ...]:
    return x.split(chunk, 1) if x.shape[1] else ()


def _steps(branches: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    if start == 0 and stop == branches[0].shape[1]:
        return branches
    return tuple(x[:, start:stop] for x in branches)


def _add(totals: tuple[Tensor, ...], terms: tuple[Tensor, ...]) -> None:
    for total, term in zip(totals, terms, strict=True):
        total.add_(term)


def _copy(targets: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    for target, x in zip(targets, found, strict=True):
        target.copy_(x)


def _empty_state(x: Operands) -> Float[Tensor, "n k v"]:
    width = math.prod(branch.shape[-1] for branch in x.k)
    return x.v.new_zeros(x.v.shape[0], width, x.v.shape[2], dtype=x.wide)
