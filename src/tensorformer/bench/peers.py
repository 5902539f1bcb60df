"""Models of other packages, built to the same shape and given the same weights."""

from __future__ import annotations

from typing import Any

import torch

from tensorformer.config.schema import FeedForward, Layer, Model, SoftmaxAttention
from tensorformer.config.shapes import ROPE_THETA
from tensorformer.config.widths import widths
from tensorformer.errors import ConfigError
from tensorformer.nn.model import TensorTransformer


def llama_shape(
    d_model: int = 128, n_layers: int = 4, n_heads: int = 4, d_ff: int = 352, vocab_size: int = 256
) -> Model:
    """Return the config of softmax attention with SwiGLU; by default about the demo's."""
    return Model(
        d_model=d_model,
        n_layers=n_layers,
        vocab_size=vocab_size,
        mixers={"softmax": SoftmaxAttention(n_heads=n_heads)},
        ffns={"swiglu": FeedForward(gate="swiglu", d_ff=d_ff)},
        layers=(Layer(mixer="softmax", ffn="swiglu"),),
    )


def llama_like(model: TensorTransformer) -> Any:
    """Return transformers' ``LlamaForCausalLM`` of the same shape with the same weights.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ConfigError("needs transformers: pip install 'tensorformer[peers]'") from None
    config, mixer = model.config, model.config.mixers["softmax"]
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=widths(config)["swiglu"],
            num_hidden_layers=config.n_layers,
            num_attention_heads=mixer.n_heads,
            num_key_value_heads=mixer.n_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": mixer.rope_theta or ROPE_THETA},
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
        )
    )
    peer.set_attn_implementation("sdpa")
    renamed = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for i in range(config.n_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        renamed[f"{ours}.mixer_norm.weight"] = f"{theirs}.input_layernorm.weight"
        renamed[f"{ours}.ffn_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            renamed[f"{ours}.mixer.{name}.weight"] = f"{theirs}.self_attn.{name}.weight"
        for name in ("gate_proj", "up_proj", "down_proj"):
            renamed[f"{ours}.ffn.{name}.weight"] = f"{theirs}.mlp.{name}.weight"
    state = {renamed[name]: p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        peer.load_state_dict(state)
    return peer
