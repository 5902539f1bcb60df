"""Every initial weight, in one place.

With normed inputs (mean square 1 a feature), 1/√fan-in keeps each projection's output at mean square 1. A product
or an activation then has the gate's second moment, which the down projection divides out, so that every
feed-forward part writes to the residual stream at the same scale whichever gate it has; the same for the gate on
a linear attention's output. Both writers of a block are shrunk by √(2 · layers), which keeps the stream's growth
with depth in bounds (Radford et al. 2019). An expert begins as a feed-forward part of its own, and the paths of a
mixture, routed and shared, share that scale; what routed experts write is as large again as the root of Σ w² over a
token's weights, which is not corrected for.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.linear_attention import LinearAttention
from tensorformer.nn.moe import MoE, RoutedExperts

EMBEDDING_STD = 0.3
TIED_STD = 0.02  # one matrix can't serve both ends: small enough for the first predictions to be even


@runtime_checkable
class HasFirstValues(Protocol):
    """A part that knows best how its own vectors begin."""

    def first_values(self, draws: torch.Generator) -> None:
        """Fill them."""
        ...


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a ``TensorTransformer``; each matrix draws from its own stream, named after it.

    So that a layer's first weights do not depend on what stands in other layers: two variants at one seed begin
    with the same embedding, and with the same attention where they have the same attention.
    """
    depth = math.sqrt(2 * len(cast(nn.ModuleList, model.get_submodule("layers"))))
    tied = model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            _normal(module.weight, TIED_STD if tied else EMBEDDING_STD, seed, path)
        elif isinstance(module, nn.Linear):
            name = path.rpartition(".")[2]
            if name in ("o_proj", "down_proj"):
                wide = module.in_features * _second_moment(model, path) * _paths(model, path)
                std = 1 / (depth * math.sqrt(wide))
            else:
                std = 1 / math.sqrt(module.in_features)
            if name != "head" or not tied:
                _normal(module.weight, std, seed, path)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RoutedExperts):
            _, width, _ = module.gate_up.shape
            wide = module.down.shape[1] * module.activation.second_moment * _paths(model, path)
            _normal(module.gate_up, 1 / math.sqrt(width), seed, f"{path}.gate_up")
            _normal(module.down, 1 / (depth * math.sqrt(wide)), seed, f"{path}.down")
    for path, module in model.named_modules():
        if isinstance(module, HasFirstValues):  # after the matrices, so that it may say what a bias in it is
            with torch.no_grad():
                module.first_values(_stream(seed, path))


def _second_moment(model: nn.Module, path: str) -> float:
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, FeedForward):
        return parent.activation.second_moment
    return parent.output.second_moment if isinstance(parent, LinearAttention) else 1.0


def _paths(model: nn.Module, path: str) -> int:
    """Return how many paths write beside one another where this module does: more than one in a mixture."""
    while path:
        path = path.rpartition(".")[0]
        if isinstance(mixture := model.get_submodule(path), MoE):
            return 1 + len(mixture.shared or ())
    return 1


def _normal(weight: torch.Tensor, std: float, seed: int, path: str) -> None:
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=_stream(seed, path)) * std)


def _stream(seed: int, path: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
