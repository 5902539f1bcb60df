"""Activation, product, routing weight and cast, one whole tensor after another."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.act_quant.cast import cast
from tensorformer.ops.act_quant.formats import Format


def forward(
    gate: Gate, g: Tensor, u: Tensor, weight: Tensor | None, spec: Format, group: int, tensor_scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of φ(g)·ψ(u)·weight, computed in float32 (float64 in float64) and rounded by the cast.

    Args:
        g, u: (..., d_ff), one shape and dtype. weight: (..., 1).
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    h = gate(g.to(wide), u.to(wide))
    if weight is not None:
        h = h * weight.to(wide)
    return cast(h, spec, group, tensor_scale)
