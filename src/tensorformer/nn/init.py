"""Every initial weight, in one place.

With normed inputs (mean square 1 a feature), 1/√fan-in keeps each projection's output at mean square 1. A product
or an activation then has the gate's second moment, which the down projection divides out, so that every
feed-forward part writes to the residual stream at the same scale whichever gate it has. Both writers of a block
are shrunk by √(2 · layers), which keeps the stream's growth with depth in bounds (Radford et al. 2019).
"""

from __future__ import annotations

import hashlib
import math
from typing import cast

import torch
from torch import nn

from tensorformer.nn.feedforward import FeedForward

EMBEDDING_STD = 0.3
TIED_STD = 0.02  # one matrix can't serve both ends: small enough for the first predictions to be even
DECAY_GATE_BIAS = 4.0  # σ(4) = 0.982: a memory of some fifty tokens to begin with


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
                std = 1 / (depth * math.sqrt(module.in_features * _second_moment(model, path)))
            else:
                std = 1 / math.sqrt(module.in_features)
            if name != "head" or not tied:
                _normal(module.weight, std, seed, path)
            if module.bias is not None:
                nn.init.constant_(module.bias, DECAY_GATE_BIAS)


def _second_moment(model: nn.Module, path: str) -> float:
    parent = model.get_submodule(path.rpartition(".")[0])
    return parent.activation.second_moment if isinstance(parent, FeedForward) else 1.0


def _normal(weight: torch.Tensor, std: float, seed: int, path: str) -> None:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=stream) * std)
