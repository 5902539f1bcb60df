"""Small models in float64, of every mixer there is and of mixtures; large weights, so that a mistake shows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tensorformer.config.schema import FeedForward, Layer, LinearAttention, Model, SoftmaxAttention
from tensorformer.nn.model import TensorTransformer
from tests.nn.mixer_laws import CONFIGS, D_MODEL

VOCAB = 31
MIXTURES = {
    "bilinear 3:1": ["bilinear_norm", "softmax"],
    "gdn with a window": ["gdn", "window"],
    "kda, ssd and nope": ["kda", "nope", "ssd"],
}
PATTERNS: dict[str, list[str]] = {**{name: [name] for name in CONFIGS}, **MIXTURES}
FEW = ["softmax", "bilinear", "gdn with a window"]
_ALL = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in PATTERNS]
every_model = pytest.mark.parametrize("name", _ALL)
some_models = pytest.mark.parametrize("name", FEW)


@functools.cache
def model(name: str, seed: int = 0) -> TensorTransformer:
    """Return a model whose blocks have the mixers of ``PATTERNS[name]``; nobody may change it."""
    pattern = PATTERNS[name]
    mixers: dict[str, SoftmaxAttention | LinearAttention] = {m.replace(" ", "_"): CONFIGS[m] for m in pattern}
    config = Model(
        d_model=D_MODEL,
        n_layers=max(2, len(pattern)),
        vocab_size=VOCAB,
        mixers=mixers,
        ffns={"f": FeedForward(gate="swiglu", d_ff=12)},
        layers=tuple(Layer(mixer=m, ffn="f") for m in mixers),
    )
    built = TensorTransformer(config).double().requires_grad_(False)
    draws = torch.Generator().manual_seed(seed)
    for p in built.parameters():
        if p.ndim > 1:
            p.copy_(torch.randn(p.shape, generator=draws, dtype=torch.float64) * 0.5)
    return built


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(100 * seed + length)).tolist()


def tokens(*shape: int, seed: int = 0) -> Any:
    """Return random tokens (batch, time)."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))
