"""What decoding carries from token to token: a growing cache for softmax, a matrix of fixed size for the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class SoftmaxState(NamedTuple):
    """Keys (turned to their positions) and values of all tokens so far."""

    k: Float[Tensor, "b h_kv t k"]
    v: Float[Tensor, "b h_kv t v"]

    @property
    def position(self) -> int:
        """Tokens seen so far."""
        return self.k.shape[2]

    @classmethod
    def empty(cls, batch: int, n_heads: int, head_dim: int, like: Tensor) -> SoftmaxState:
        """Return the state before the first token."""
        nothing = like.new_empty(batch, n_heads, 0, head_dim)
        return cls(nothing, nothing)

    def append(self, k: Float[Tensor, "b h_kv t k"], v: Float[Tensor, "b h_kv t v"]) -> SoftmaxState:
        """Return the state after further tokens; this one stays as it is."""
        return SoftmaxState(torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2))


class LinearState(NamedTuple):
    """The sum Σ decay · φ(k) vᵀ of each head, at least float32, and how many tokens went into it."""

    memory: Float[Tensor, "b h features v"]
    position: int

    @classmethod
    def empty(cls, batch: int, n_heads: int, features: int, value_dim: int, like: Tensor) -> LinearState:
        """Return the state before the first token."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cls(torch.zeros(batch, n_heads, features, value_dim, dtype=dtype, device=like.device), 0)


State = SoftmaxState | LinearState
