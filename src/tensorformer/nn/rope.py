"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), features paired as (i, i + D/2) as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorformer.nn.constants import Constants


class Rope(Constants):
    """Turns each pair of features by position · θ^(−2i/D).

    Args:
        dim: D, features of a head; even.
        theta: the base θ.
    """

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__([theta ** -(i / dim) for i in range(0, dim, 2)])

    def tables(
        self, position: Int[Tensor, "*b t"]
    ) -> tuple[Float[Tensor, "*b t 1 half"], Float[Tensor, "*b t 1 half"]]:
        """Return cosines and sines for the positions, to broadcast over heads."""
        angles = (position.unsqueeze(-1) * self.values).unsqueeze(-2)
        return angles.cos(), angles.sin()


def rotate(
    x_bthk: Float[Tensor, "b t h k"], tables: tuple[Float[Tensor, "*b t 1 half"], Float[Tensor, "*b t 1 half"]]
) -> Float[Tensor, "b t h k"]:
    """Return ``x`` with each of its feature pairs turned; the dtype of ``x`` is kept."""
    cos, sin = (table.to(x_bthk.dtype) for table in tables)
    if torch.compiler.is_compiling():  # a compiler fuses it, and would have to leave its graph for writes into halves
        a, b = x_bthk.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return _Rotate.apply(x_bthk, cos, sin)


class _Rotate(torch.autograd.Function):
    # A turn's gradient is the turn back: nothing but the tables is kept, and each direction is two passes over x.

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        first, second = y.chunk(2, dim=-1)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos, -sin), None, None
