"""The sizes that a recipe implies: which block stands where, and how wide its heads are."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tensorformer.config.schema import LinearAttention, LinearPreset, Model, SoftmaxAttention


class Preset(NamedTuple):
    """A point of the linear-attention grid, and what stands around the operator."""

    degree: Literal[1, 2]  # branches whose scores are multiplied
    decay: Literal["none", "fixed", "learned"]  # one scalar a head: none, RetNet's constants, or a gate of the input
    output_norm: bool  # RMSNorm without gain on each head's output
    source: str


PRESETS: dict[LinearPreset, Preset] = {
    "bilinear": Preset(2, "none", False, "Riggs 2026, Tensor Transformers: the published form"),
    "bilinear_norm": Preset(2, "none", True, "the published form with its outputs normalised"),
    "bilinear_decay": Preset(2, "learned", True, "the published form with a gate on its memory"),
    "linear": Preset(1, "none", True, "Katharopoulos et al. 2020, arXiv 2006.16236, with φ(x) = x and no denominator"),
    "retention": Preset(1, "fixed", True, "Sun et al. 2023, RetNet, arXiv 2307.08621"),
}


class Heads(NamedTuple):
    """Sizes of an attention layer, nothing left to default."""

    n_heads: int
    n_kv_heads: int
    head_dim: int  # features of a query or key, each branch
    value_dim: int


def heads(mixer: SoftmaxAttention | LinearAttention, d_model: int) -> Heads:
    """Return the sizes of an attention layer in a model of width ``d_model``."""
    head_dim = mixer.head_dim or d_model // mixer.n_heads
    if isinstance(mixer, SoftmaxAttention):
        return Heads(mixer.n_heads, mixer.n_kv_heads or mixer.n_heads, head_dim, head_dim)
    return Heads(mixer.n_heads, mixer.n_heads, head_dim, mixer.value_dim or d_model // mixer.n_heads)


def blocks(model: Model) -> list[tuple[str, str]]:
    """Return the names of every block's mixer and feed-forward part, bottom to top: the pattern, cycled."""
    pattern = [(layer.mixer, layer.ffn) for layer in model.layers for _ in range(layer.repeat)]
    return [pattern[i % len(pattern)] for i in range(model.n_layers)]
