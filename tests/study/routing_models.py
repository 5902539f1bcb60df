"""Small models for studies of routing."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from tensorformer.config import schema
from tensorformer.nn.block import Block
from tensorformer.nn.model import TensorTransformer
from tensorformer.study.routing import run_routing
from tensorformer.study.routing_change import Attention
from tensorformer.study.routing_result import Run

SOFTMAX: dict[str, Any] = {"kind": "softmax_attention", "n_heads": 2}


def linear(preset: str, **options: Any) -> dict[str, Any]:
    """Return the table of a linear mixer."""
    return {"kind": "linear_attention", "preset": preset, "n_heads": 2} | options


def model(*mixers: dict[str, Any], seed: int = 0) -> TensorTransformer:
    """Return a model with a block for each mixer, named m0, m1, …; scores large enough to tell keys apart."""
    config = msgspec.convert(
        {
            "d_model": 16,
            "n_layers": len(mixers),
            "vocab_size": 32,
            "mixers": {f"m{i}": mixer for i, mixer in enumerate(mixers)},
            "ffns": {"f": {"kind": "feed_forward", "gate": "bilinear", "d_ff": 12}},
            "layers": [{"mixer": f"m{i}", "ffn": "f"} for i in range(len(mixers))],
        },
        schema.Model,
    )
    made = TensorTransformer(config, seed)
    draws = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.copy_(torch.randn(p.shape, generator=draws))
    return made


def mixer(table: dict[str, Any], dtype: torch.dtype = torch.float64) -> Attention:
    """Return one layer's mixer."""
    block = model(table).to(dtype).layers[0]
    assert isinstance(block, Block)
    return block.mixer


def inputs(t: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return one window of what goes into a mixer."""
    return torch.randn(1, t, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens(windows: int, t: int, seed: int = 3) -> Tensor:
    """Return windows of tokens."""
    return torch.randint(32, (windows, t), generator=torch.Generator().manual_seed(seed))


def measured(*mixers: dict[str, Any], name: str = "model", windows: int = 2, t: int = 40, context: int = 16) -> Run:
    """Return the measured routing of a small model."""
    return run_routing(model(*mixers), [tokens(windows, t)], context, name)
