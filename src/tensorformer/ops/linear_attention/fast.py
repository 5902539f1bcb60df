"""The fast path: the chunked form on rows and heads that are computed together."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tensorformer.ops.linear_attention import chunked
from tensorformer.ops.linear_attention.chunked import Operands
from tensorformer.ops.linear_attention.plan import TILE, WORKING_SET


class Group(NamedTuple):
    """Rows of the batch and heads that are computed together, as slices of (B, T, H, ·) and (B, H, ·) tensors."""

    rows: slice
    heads: slice

    def flat(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T, H, ·) → (N, T, ·): a view where strides and dtype allow, a copy where not."""
        return x[self.rows, :, self.heads].transpose(1, 2).to(dtype).flatten(0, 1)

    def state(self, s: Tensor, dtype: torch.dtype) -> Tensor:
        return s[self.rows, self.heads].to(dtype).flatten(0, 1)

    def write(self, whole: Tensor, part: Tensor) -> None:
        """Write (N, T, ·) into its place in (B, T, H, ·)."""
        view = whole[self.rows, :, self.heads].transpose(1, 2)
        view.copy_(part.view(view.shape))

    def place(self, whole: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (N, T, ·) to fill: a view of its place in (B, T, H, ·) if there is one, otherwise a new tensor."""
        view = whole[self.rows, :, self.heads].transpose(1, 2)
        if self._views(view, dtype):
            return view[0]
        return torch.empty(view.shape[0] * view.shape[1], *view.shape[2:], dtype=dtype, device=whole.device)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write what has been filled, which came from `place`, into its place."""
        if not self._views(whole[self.rows], part.dtype):
            self.write(whole, part)

    def _views(self, rows: Tensor, dtype: torch.dtype) -> bool:
        return rows.shape[0] == 1 and rows.dtype == dtype

    def write_state(self, whole: Tensor, part: Tensor) -> None:
        """Write (N, K, V) into its place in (B, H, K, V)."""
        view = whole[self.rows, self.heads]
        view.copy_(part.view(view.shape))

    def operands(
        self,
        q: tuple[Tensor, ...],
        k: tuple[Tensor, ...],
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor | None,
    ) -> Operands:
        # Products of two float16 Gram matrices leave the range of float16 where the result does not.
        dtype = torch.float32 if v.dtype == torch.float16 else v.dtype
        return Operands(
            tuple(self.flat(x, dtype) for x in q),
            tuple(self.flat(x, dtype) for x in k),
            self.flat(v, dtype),
            None if log_decay is None else self.flat(log_decay, torch.float64),
            None if state is None else self.state(state, torch.promote_types(dtype, torch.float32)),
        )


def groups(v: Tensor, chunk: int, chunks: int = 1) -> list[Group]:
    """Cut (B, T, H, V) into groups: everything on an accelerator, a cacheful of Gram tiles on a CPU.

    Args:
        v: the values.
        chunk: steps a chunk.
        chunks: how many are computed together.
    """
    batch, time, heads, _ = v.shape
    size = batch * heads
    if v.device.type == "cpu":
        steps = min(time, chunk)
        tile = max(1, chunks * min(steps, TILE) * steps * v.element_size())
        size = torch.get_num_threads() * max(1, WORKING_SET // tile)
    if size >= heads:
        rows = size // max(1, heads)
        return [Group(slice(b, b + rows), slice(None)) for b in range(0, batch, max(1, rows))]
    return [Group(slice(b, b + 1), slice(h, h + size)) for b in range(batch) for h in range(0, heads, size)]


def forward(
    q: tuple[Tensor, ...],
    k: tuple[Tensor, ...],
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    chunk: int,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, T, H, V) and, if `final`, the state (B, H, K, V)."""
    if v.shape[1] == 1 and state is not None:
        y, s = decode(q, k, v, log_decay, state)
        return y, s if final else None
    batch, _, heads, value = v.shape
    y, s = torch.empty(v.shape, dtype=v.dtype, device=v.device), None
    if final:
        wide = torch.promote_types(v.dtype, torch.float32)
        width = math.prod([x.shape[-1] for x in k])
        s = torch.empty(batch, heads, width, value, dtype=wide, device=v.device)
    with torch.autocast(v.device.type, enabled=False):
        for group in groups(v, chunk):
            x = group.operands(q, k, v, log_decay, state)
            y_part = group.place(y, x.v.dtype)
            s_part = chunked.forward(y_part, x, chunk, final)
            group.put(y, y_part)
            if s is not None and s_part is not None:
                group.write_state(s, s_part)
    return y, s


def backward(
    q: tuple[Tensor, ...],
    k: tuple[Tensor, ...],
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    dy: Tensor | None,
    d_state: Tensor | None,
    chunk: int,
    state_needed: bool,
    decay_needed: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of v, log_decay, state, and every branch of q and k, each like its operand."""
    wanted = (v, log_decay if decay_needed else None, state if state_needed else None, *q, *k)
    grads = tuple(None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in wanted)
    dv, d_log_decay, d_initial, *d_qk = grads
    assert dv is not None
    with torch.autocast(v.device.type, enabled=False):
        for group in groups(v, chunk):
            x = group.operands(q, k, v, log_decay, state)
            d_y = torch.zeros_like(x.v) if dy is None else group.flat(dy, x.v.dtype)
            d_s = None if d_state is None else group.state(d_state, x.wide)
            parts = tuple(group.place(whole, x.wide) for whole in d_qk if whole is not None)
            decay_part = None if d_log_decay is None else group.place(d_log_decay, torch.float64)
            into = Operands(parts[: len(q)], parts[len(q) :], group.place(dv, x.wide), decay_part, None)
            s_part = chunked.backward(into, x, d_y, d_s, chunk, state_needed)
            for whole, part in zip((dv, d_log_decay, *d_qk), (into.v, decay_part, *parts), strict=True):
                if whole is not None and part is not None:
                    group.put(whole, part)
            if d_initial is not None and s_part is not None:
                group.write_state(d_initial, s_part)
    return grads


def decode(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and the state after a single step: the same as `forward`, with less around it."""
    dtype = v.dtype
    if dtype != state.dtype:
        q, k = (tuple(x.to(state.dtype) for x in branches) for branches in (q, k))
        v = v.to(state.dtype)
    flat = state.flatten(0, 1)
    count, _, value = flat.shape
    phi_q, phi_k = _outer(q, count).unsqueeze(1), _outer(k, count).unsqueeze(2)
    u = v.reshape(count, 1, value)
    if log_decay is None:
        s = torch.addcmul(flat, phi_k, u)
    else:
        s = torch.mul(phi_k, u).addcmul_(flat, log_decay.reshape(count, 1, 1).to(flat.dtype).exp())
    with torch.autocast(v.device.type, enabled=False):
        y = torch.bmm(phi_q, s)
    return y.view(v.shape).to(dtype), s.view(state.shape)


def _outer(x: tuple[Tensor, ...], count: int) -> Tensor:
    first, *rest = (branch.reshape(count, -1) for branch in x)
    return (first.unsqueeze(2) * rest[0].unsqueeze(1)).flatten(1) if rest else first
