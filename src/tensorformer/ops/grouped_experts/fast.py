"""Rows sorted by expert, a few experts at a time, so that what is between their products stays in the cache.

Only the projections are kept for backward. A weight is multiplied into h, which is narrower than what comes of it; so
the gradient of a weight is ⟨dh, h⟩, and no output of an expert is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.groups import Groups, Tile, group
from tensorformer.ops.grouped_experts.products import Scratch, each, products, transposed_products
from tensorformer.ops.grouped_experts.step import Step


def groups_of(operands: Operands, indices: Tensor) -> Groups:
    """Sort the rows of ``indices`` (N, k) by expert.

    Raises:
        ShapeError: an index names no expert.
    """
    return group(indices, len(operands.down), max(operands.gate_up.shape[1:]))


def forward(operands: Operands, groups: Groups, activation: Activation, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return y (N, d), and the projections (N·k, 2·d_ff) sorted by expert, if they are to be kept.

    Args:
        operands: in one dtype, but for the routing weights; any strides.
        groups: the rows of each expert.
        activation: between the products.
        keep: whether there will be a backward.
    """
    x, gate_up, down, weights, gate_up_bias, down_bias = operands
    (d, columns), wide = gate_up.shape[1:], operands.wide
    y = x.new_zeros(x.shape, dtype=wide)
    kept = x.new_empty(len(groups.order), columns) if keep else None
    shares, scratch = _shares(weights, groups, wide), Scratch(x, groups.most)
    for tile in groups.tiles:
        token, share = groups.token[tile.rows], shares[tile.rows]
        xs = torch.index_select(x, 0, token, out=scratch("x", tile, d))
        pre = scratch("pre", tile, columns) if kept is None else kept[tile.rows]
        products(tile, xs, gate_up, pre, gate_up_bias)
        h = Step(activation, pre, tile.expert_of_row(x.device) if activation.differs else None).value()
        out = products(tile, _scaled(h, share), down, scratch("out", tile, d)).to(wide)
        if down_bias is not None:
            for e, rows, s in each(tile, out, share):
                rows.addr_(s[:, 0], down_bias[e].to(wide))
        y.index_add_(0, token, out)
    return y.to(x.dtype), kept


def backward(
    operands: Operands, groups: Groups, activation: Activation, kept: Tensor, dy: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradient of each operand, then of each parameter that is a tensor; None where it is not needed.

    Args:
        operands, groups, activation: as in ``forward``.
        kept: the projections it returned.
        dy: (N, d), any strides.
        needed: for each operand and then each parameter, whether its gradient is wanted.
    """
    x, gate_up, down, weights, _, down_bias = operands
    (d, columns), d_ff, wide = gate_up.shape[1:], down.shape[1], operands.wide
    dx, d_gate_up, d_down, d_shares, d_gate_up_bias, d_down_bias = _places(operands, groups, needed)
    d_parameters = {
        n: torch.zeros_like(v, dtype=wide)
        for (n, v), wanted in zip(activation.tensors.items(), needed[6:], strict=True)
        if wanted
    }
    inner = needed[0] or needed[1] or needed[4] or any(needed[6:])
    shares, scratch = _shares(weights, groups, wide), Scratch(x, groups.most)
    for tile in groups.tiles:
        token, share = groups.token[tile.rows], shares[tile.rows]
        dys = torch.index_select(dy, 0, token, out=scratch("out", tile, d))
        dh = products(tile, dys, down.mT, scratch("dh", tile, d_ff))
        step = Step(activation, kept[tile.rows], tile.expert_of_row(x.device) if activation.differs else None)
        h = step.value()
        if d_shares is not None:
            _of_weights(tile, dh, h, dys, down_bias, d_shares[tile.rows])
        if d_down is not None:
            transposed_products(tile, _scaled(h, share), dys, d_down)
        if d_down_bias is not None:
            for e, rows, s in each(tile, dys, share):
                d_down_bias[e] = torch.mv(rows.to(wide).mT, s[:, 0])
        if not inner:
            continue
        d_pre = scratch("pre", tile, columns)
        step.pull(_scaled(dh, share), d_pre, d_parameters)
        if d_gate_up is not None:
            xs = torch.index_select(x, 0, token, out=scratch("x", tile, d))
            transposed_products(tile, xs, d_pre, d_gate_up)
        if d_gate_up_bias is not None:
            for e, rows, _ in each(tile, d_pre, share):
                torch.sum(rows, 0, out=d_gate_up_bias[e])
        if dx is not None:
            dx.index_add_(0, token, products(tile, d_pre, gate_up.mT, scratch("out", tile, d)).to(wide))
    of_weights = None
    if d_shares is not None:
        of_weights = torch.empty_like(d_shares).index_copy_(0, groups.order, d_shares).view(weights.shape)
        of_weights = of_weights.to(weights.dtype)
    dx = None if dx is None else dx.to(x.dtype)
    of_parameters = [d_parameters[n].to(v.dtype) if n in d_parameters else None for n, v in activation.tensors.items()]
    return [dx, d_gate_up, d_down, of_weights, d_gate_up_bias, d_down_bias, *of_parameters]


def place(t: Tensor) -> Tensor:
    """Return an unwritten gradient of ``t``: laid out as it is, or contiguous where its places overlap."""
    return torch.empty_like(t)


def _places(operands: Operands, groups: Groups, needed: Sequence[bool]) -> list[Tensor | None]:
    """Return where the gradients of operands go: zero for tokens and for experts without a row, else unwritten."""
    x, rows = operands.x, len(groups.order)
    made = [place(t) if n and t is not None else None for t, n in zip(operands, needed, strict=False)]
    made[0] = x.new_zeros(x.shape, dtype=operands.wide) if needed[0] else None
    made[3] = x.new_empty(rows, dtype=operands.wide) if needed[3] else None
    for grad in (made[i] for i in (1, 2, 4, 5)):
        if grad is not None:
            for experts in groups.idle():
                grad[experts].zero_()
    return made


def _of_weights(tile: Tile, dh: Tensor, h: Tensor, dys: Tensor, down_bias: Tensor | None, into: Tensor) -> None:
    torch.linalg.vecdot(dh.to(into.dtype), h.to(into.dtype), out=into)
    if down_bias is not None:
        for e, rows, total in each(tile, dys, into):
            total += torch.mv(rows.to(into.dtype), down_bias[e].to(into.dtype))


def _shares(weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the routing weight of each row, as a column."""
    return weights.flatten().index_select(0, groups.order).to(dtype).unsqueeze(1)


def _scaled(rows: Tensor, share: Tensor) -> Tensor:
    return (rows * share).to(rows.dtype)
