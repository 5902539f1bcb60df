"""The sizes that a recipe implies: which block stands where, and how wide its heads are."""

from __future__ import annotations

from typing import NamedTuple

from tensorformer.config.presets import PRESETS
from tensorformer.config.schema import LinearAttention, Model, SoftmaxAttention

ROPE_THETA = 10_000.0


class Heads(NamedTuple):
    """Sizes of an attention layer, nothing left to default."""

    n_heads: int  # of the queries in softmax attention, of the values in linear attention
    n_kv_heads: int  # of keys and values in softmax attention, of queries and keys in linear attention
    head_dim: int  # features of a query or key, each branch
    value_dim: int


def heads(mixer: SoftmaxAttention | LinearAttention, d_model: int) -> Heads:
    """Return the sizes of an attention layer in a model of width ``d_model``."""
    n_heads = mixer.n_heads
    head_dim = mixer.head_dim or d_model // n_heads
    if isinstance(mixer, SoftmaxAttention):
        return Heads(n_heads, mixer.n_kv_heads or n_heads, head_dim, head_dim)
    n_key_heads = mixer.n_key_heads or (1 if PRESETS[mixer.preset].shared_keys else n_heads)
    return Heads(n_heads, n_key_heads, head_dim, mixer.value_dim or d_model // n_heads)


def blocks(model: Model) -> list[tuple[str, str]]:
    """Return the names of every block's mixer and feed-forward part, bottom to top: the pattern, cycled."""
    pattern = [(layer.mixer, layer.ffn) for layer in model.layers for _ in range(layer.repeat)]
    return [pattern[i % len(pattern)] for i in range(model.n_layers)]
