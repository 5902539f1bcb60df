"""Exact parameter and FLOP counts, from the config alone."""

from __future__ import annotations

from tensorformer.config.check import feed_forward_activation, is_gated, learned_parameters
from tensorformer.config.row_activations import RowActivation
from tensorformer.config.schema import FeedForward, LinearAttention, Model, SoftmaxAttention
from tensorformer.config.shapes import PRESETS, Heads, blocks, heads
from tensorformer.ops.linear_attention import flops as linear_attention_flops
from tensorformer.ops.linear_attention.plan import auto_chunk


def parameters(model: Model) -> int:
    """Return the number of trained parameters, embeddings included; a tied head counts once."""
    norm = model.d_model * (2 if model.norm == "layer_norm" else 1)
    total = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2) + norm
    for mixer, ffn in blocks(model):
        total += 2 * norm
        total += mixer_matrices(model.mixers[mixer], model.d_model) + _mixer_vectors(model.mixers[mixer])
        total += feed_forward_matrices(model.ffns[ffn], model.d_model) + _feed_forward_vectors(model.ffns[ffn])
    return total


def forward_flops(model: Model, context: int) -> int:
    """Return the matrix-multiplication FLOPs of a forward pass, a token, at ``context`` tokens.

    A multiply-add is two. Softmax attention is counted with the whole score matrix, as torch's own counter does.
    """
    total = 2 * model.vocab_size * model.d_model  # the head; looking an embedding up multiplies nothing
    for mixer, ffn in blocks(model):
        total += 2 * mixer_matrices(model.mixers[mixer], model.d_model)
        total += 2 * feed_forward_matrices(model.ffns[ffn], model.d_model)
        total += _score_flops(model.mixers[mixer], model.d_model, context) // context
    return total


def causal_flops(model: Model, context: int) -> int:
    """Return the FLOPs of a forward pass, a token, with every score that a causal model has no use for left out.

    What models of different attention are matched by: ``forward_flops`` charges softmax for the masked half of its
    scores, which bilinear attention never computes.
    """
    total = forward_flops(model, context)
    for mixer, _ in blocks(model):
        part, pairs = model.mixers[mixer], context * (context - 1) // 2
        h = heads(part, model.d_model)
        if isinstance(part, SoftmaxAttention):
            total -= 4 * h.n_heads * h.head_dim * pairs // context
        elif _is_quadratic(part, h, context):
            needed = 2 * (PRESETS[part.preset].degree * h.head_dim + h.value_dim) * h.n_heads * (pairs + context)
            total += (needed - _score_flops(part, model.d_model, context)) // context
    return total


def training_flops(model: Model, context: int) -> int:
    """Return the FLOPs of a training step, a token: a backward pass costs two forward ones; recomputation is free."""
    return 3 * forward_flops(model, context)


def feed_forward_matrices(ffn: FeedForward, d_model: int) -> int:
    """Return the number of weights in a feed-forward part: three matrices around a gate, two around a scalar."""
    return d_model * ffn.d_ff * (3 if is_gated(feed_forward_activation(ffn)) else 2)


def mixer_matrices(mixer: SoftmaxAttention | LinearAttention, d_model: int) -> int:
    """Return the number of weights in the projections of an attention layer."""
    h = heads(mixer, d_model)
    if isinstance(mixer, SoftmaxAttention):
        return d_model * h.head_dim * (2 * h.n_heads + 2 * h.n_kv_heads)
    preset = PRESETS[mixer.preset]
    gate = h.n_heads if preset.decay == "learned" else 0
    return d_model * (2 * preset.degree * h.n_heads * h.head_dim + 2 * h.n_heads * h.value_dim + gate)


def _is_quadratic(mixer: LinearAttention, h: Heads, context: int) -> bool:
    key_dims = (h.head_dim,) * PRESETS[mixer.preset].degree
    return auto_chunk(context, key_dims, h.value_dim, initial=False, final=False) >= context


def _mixer_vectors(mixer: SoftmaxAttention | LinearAttention) -> int:
    learned = isinstance(mixer, LinearAttention) and PRESETS[mixer.preset].decay == "learned"
    return mixer.n_heads if learned else 0  # the decay gate's bias


def _feed_forward_vectors(ffn: FeedForward) -> int:
    activation = feed_forward_activation(ffn)
    own = activation.weights(ffn.d_ff) if isinstance(activation, RowActivation) else 0
    return own + len(learned_parameters(ffn))


def _score_flops(mixer: SoftmaxAttention | LinearAttention, d_model: int, context: int) -> int:
    h = heads(mixer, d_model)
    if isinstance(mixer, SoftmaxAttention):
        return 4 * h.n_heads * context * context * h.head_dim
    preset = PRESETS[mixer.preset]
    return linear_attention_flops(1, context, h.n_heads, (h.head_dim,) * preset.degree, h.value_dim, final_state=False)
