"""The definition: two matrix products, then the gate."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tensorformer.gates import Gate


def forward(
    gate: Gate, x: Float[Tensor, "*rows d"], w_gate: Float[Tensor, "f d"], w_up: Float[Tensor, "f d"]
) -> Float[Tensor, "*rows f"]:
    """Return φ(x W_gᵀ)·ψ(x W_uᵀ): both products rounded to the dtype, then the gate in it. Differentiable."""
    return gate(F.linear(x, w_gate), F.linear(x, w_up))
