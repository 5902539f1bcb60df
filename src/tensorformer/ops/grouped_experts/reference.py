"""The definition: a loop over experts, each on the tokens that chose it."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands, check_indices


def forward(operands: Operands, indices: Tensor, activation: Activation) -> Tensor:
    """Return Σ_j w_nj · E_{i_nj}(x_n), with E_e(x) = h(x A_e + a_e) B_e + b_e; differentiable any number of times.

    Args:
        operands: in one dtype, but for the routing weights.
        indices: (N, k), which experts each token goes to; an expert named twice counts twice.
        activation: h.

    Returns:
        (N, d) in the dtype of x: each product is rounded to it, and their sum is taken in float32 or better.

    Raises:
        ShapeError: an index names no expert.
    """
    x, gate_up, down, weights, gate_up_bias, down_bias = operands
    check_indices(indices, len(down))
    y = x.new_zeros(x.shape, dtype=operands.wide)
    biases = [(None,) * len(down) if b is None else b.unbind() for b in (gate_up_bias, down_bias)]
    for e, (first, second, a, b) in enumerate(zip(gate_up.unbind(), down.unbind(), *biases, strict=True)):
        token, slot = (indices == e).nonzero(as_tuple=True)
        pre = _affine(x[token], first, a)
        out = _affine(activation.on_rows(torch.full_like(token, e))(pre), second, b)
        y = y.index_add(0, token, weights[token, slot, None].to(y.dtype) * out.to(y.dtype))
    return y.to(x.dtype)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
