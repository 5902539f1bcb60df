"""Tensor Transformers in PyTorch: bilinear layers, bilinear attention, and matched comparisons.

Every public name is loaded when it is first asked for, so that the command line answers without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorformer.config.load import load_config
    from tensorformer.gates import GATES, SCALARS, activation
    from tensorformer.nn.feedforward import FeedForward
    from tensorformer.nn.linear_attention import LinearAttention
    from tensorformer.nn.model import TensorTransformer
    from tensorformer.nn.moe import MoE
    from tensorformer.nn.softmax_attention import SoftmaxAttention
    from tensorformer.ops.act_and_mul import act_and_mul
    from tensorformer.ops.act_quant import act_quant
    from tensorformer.ops.grouped_experts import grouped_experts
    from tensorformer.ops.linear_attention import linear_attention

__version__ = "0.1.0"

__all__ = [
    "GATES",
    "SCALARS",
    "FeedForward",
    "LinearAttention",
    "MoE",
    "SoftmaxAttention",
    "TensorTransformer",
    "act_and_mul",
    "act_quant",
    "activation",
    "grouped_experts",
    "linear_attention",
    "load_config",
]

_HOMES = {
    "load_config": "tensorformer.config.load",
    "GATES": "tensorformer.gates",
    "SCALARS": "tensorformer.gates",
    "activation": "tensorformer.gates",
    "FeedForward": "tensorformer.nn.feedforward",
    "LinearAttention": "tensorformer.nn.linear_attention",
    "MoE": "tensorformer.nn.moe",
    "SoftmaxAttention": "tensorformer.nn.softmax_attention",
    "TensorTransformer": "tensorformer.nn.model",
    "act_and_mul": "tensorformer.ops.act_and_mul",
    "act_quant": "tensorformer.ops.act_quant",
    "grouped_experts": "tensorformer.ops.grouped_experts",
    "linear_attention": "tensorformer.ops.linear_attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorformer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
