"""Experts on a GPU: rows sorted by expert, every product one launch over tiles that know their expert.

The activation is computed behind the first products and its gradients behind those of dh; the routing weight enters
behind the second. Each choice of an expert has a row of its own, and the rows of a token are summed in its order, so
that the result is the same every time. As in ``fast``, only the projections are kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.kernel import PLAIN, recording, transforming
from tensorformer.ops.grouped_experts import triton_launch as launch
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.triton_activation import activation_text
from tensorformer.ops.grouped_experts.triton_rows import Rows, sort_rows
from tensorformer.ops.triton_kernel import DTYPES, why_not_here


def why_not(operands: Operands, activation: Activation) -> str | None:
    """Say why it can't run, and what to do about it; None where it can."""
    dtype, device = operands.x.dtype, operands.x.device
    graph = torch.compiler.is_compiling()
    if not graph and (recording() or transforming() or any(type(t) not in PLAIN for t in operands.given())):
        return 'is invisible to tensor subclasses, modes, tracers and transforms: write impl="auto"'
    if dtype not in DTYPES:
        return f'computes in float32, which is too little for {dtype}: write impl="fast"'
    if reason := _why_not_here(dtype, device):
        return reason
    # A graph asks for the gradient of every parameter that is a tensor.
    learned = [n for n, v in activation.tensors.items() if graph or (v.requires_grad and torch.is_grad_enabled())]
    if learned:
        return f'has no gradient by {" and ".join(learned)} of {activation.gate.name}: write impl="fast"'
    return _why_not_known(activation.kind, activation.gate.name) if graph else _why_not_printed(activation.gate)


def _why_not_here(dtype: torch.dtype, device: torch.device) -> str | None:
    if reason := why_not_here(device):
        return reason
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "can't run in bfloat16 under TRITON_INTERPRET=1, whose products are wrong: write .float()"
    return None


def _why_not_printed(gate: Gate | Scalar) -> str | None:
    try:
        activation_text(gate, backward=True)
    except GateError as error:
        return str(error)
    return None


def _why_not_known(kind: str, name: str) -> str | None:
    """Ask of one of the catalogue: a graph holds no others."""
    catalogue = GATES if kind == "gate" else SCALARS
    return _why_not_printed(catalogue[name]) if name in catalogue else None


# Asked once while tracing a graph: the answers are the machine's and the catalogue's, not of the operands.
_why_not_here._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
_why_not_known._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def groups_of(operands: Operands, indices: Tensor) -> Rows:
    """Sort the rows of ``indices`` (N, k) by expert.

    Raises:
        ShapeError: an index names no expert.
    """
    return sort_rows(indices, len(operands.down), launch.widest(operands.x.dtype))


def forward(operands: Operands, groups: Rows, activation: Activation, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return y (N, d), and the projections (N·k, 2·d_ff) sorted by expert, if they are to be kept.

    Args:
        operands: in one dtype, but for the routing weights; any strides.
        groups: the rows of each expert.
        activation: between the products.
        keep: whether there will be a backward.
    """
    x, gate_up, down, weights, gate_up_bias, down_bias = _seen(operands)
    kept = _room(groups, gate_up.shape[2], x) if keep else None
    h = launch.projections(x, gate_up, gate_up_bias, activation, groups, kept)
    out = launch.products(h, down, down_bias, _shares(weights, groups), groups)
    return _combined(out, weights), kept


def backward(
    operands: Operands, groups: Rows, activation: Activation, kept: Tensor, dy: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradient of each operand; None where it is not needed, and for parameters, which have none here.

    Args:
        operands, groups, activation: as in ``forward``.
        kept: the projections it returned.
        dy: (N, d), any strides.
        needed: for each operand, whether its gradient is wanted.
    """
    x, gate_up, down, weights, gate_up_bias, down_bias = _seen(operands)
    dy, share = dy.resolve_neg(), _shares(weights, groups)
    dx = d_weights = None
    d_gate_up, d_down, d_gate_up_bias, d_down_bias = (
        torch.empty_like(t) if n and t is not None else None
        for t, n in zip((gate_up, down, gate_up_bias, down_bias), (*needed[1:3], *needed[4:6]), strict=True)
    )
    d_pre = _room(groups, gate_up.shape[2], x) if needed[0] or needed[1] or needed[4] else None
    sent = _room(groups, down.shape[1], x) if needed[2] or needed[5] else None
    if d_pre is not None or sent is not None or needed[3]:
        found = launch.gradients(
            dy, down, down_bias, kept, share, activation, groups, d_pre, sent, share_wanted=needed[3]
        )
        d_weights = None if found is None else found.view(weights.shape).to(weights.dtype)
    if sent is not None:
        launch.transposed_products(sent, dy, groups, d_down, d_down_bias, share)
    if d_pre is not None:
        launch.transposed_products(x, d_pre, groups, d_gate_up, d_gate_up_bias)
        if needed[0]:
            dx = _combined(launch.products(d_pre, gate_up.mT, None, None, groups), weights)
    return [dx, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias, *(None for _ in needed[6:])]


def _seen(operands: Operands) -> Operands:
    """Return the operands as they are in memory, without a negative sign that only torch knows of."""
    return operands._replace(**{n: t.resolve_neg() for n, t in operands._asdict().items() if t is not None})


def _room(groups: Rows, columns: int, like: Tensor) -> Tensor:
    return torch.empty((len(groups.order), columns), dtype=like.dtype, device=like.device)


def _shares(weights: Tensor, groups: Rows) -> Tensor:
    """Return the routing weight of each row, in float32."""
    return weights.flatten().index_select(0, groups.order).float()


def _combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows of each token, in float32 and in their order."""
    return rows.view(*weights.shape, rows.shape[1]).sum(1)
