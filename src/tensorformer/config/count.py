"""Exact parameter and FLOP counts, from the config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tensorformer.config.count_feed_forward import (
    active_feed_forward_weights,
    feed_forward_products,
    feed_forward_weights,
)
from tensorformer.config.presets import GLA_RANK, Preset, resolved
from tensorformer.config.schema import FeedForward, LinearAttention, Model, MoE, SoftmaxAttention
from tensorformer.config.shapes import Heads, blocks, heads
from tensorformer.ops.linear_attention import flops as linear_attention_flops
from tensorformer.ops.linear_attention.plan import auto_chunk


def parameters(model: Model) -> int:
    """Return the number of trained parameters, embeddings included; a tied head counts once."""
    return _parameters(model, feed_forward_weights)


def active_parameters(model: Model) -> int:
    """Return the parameters that a token meets: embeddings all, of a mixture the experts it is routed to."""
    return _parameters(model, active_feed_forward_weights)


def _parameters(model: Model, count: Callable[[FeedForward | MoE, int], int]) -> int:
    norm = model.d_model * (2 if model.norm == "layer_norm" else 1)
    total = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2) + norm
    for (mixer, ffn), n in Counter(blocks(model)).items():
        attention = model.mixers[mixer]
        attending = mixer_matrices(attention, model.d_model) + _mixer_vectors(attention, model.d_model)
        total += n * (2 * norm + attending + count(model.ffns[ffn], model.d_model))
    return total


def forward_flops(model: Model, context: int) -> int:
    """Return the matrix-multiplication FLOPs of a forward pass, a token, at ``context`` tokens.

    A multiply-add is two. Softmax attention is counted with the whole score matrix, as torch's own counter does.
    """
    total = 2 * model.vocab_size * model.d_model  # the head; looking an embedding up multiplies nothing
    for mixer, ffn in blocks(model):
        total += 2 * mixer_matrices(model.mixers[mixer], model.d_model)
        total += 2 * feed_forward_products(model.ffns[ffn], model.d_model)
        total += _score_flops(model.mixers[mixer], model.d_model, context) // context
    return total


def causal_flops(model: Model, context: int) -> int:
    """Return the FLOPs of a forward pass, a token, with every score that a causal model has no use for left out.

    What models of different attention are matched by: ``forward_flops`` charges softmax for the masked half of its
    scores, which bilinear attention never computes, and for those beyond its window.
    """
    total = forward_flops(model, context)
    for mixer, _ in blocks(model):
        part, h = model.mixers[mixer], heads(model.mixers[mixer], model.d_model)
        pairs = context * (context - 1) // 2
        if isinstance(part, SoftmaxAttention):
            reach = min(part.window or context, context)
            seen = reach * (reach + 1) // 2 + (context - reach) * reach
            total -= 4 * h.n_heads * h.head_dim * (context * context - seen) // context
        elif _is_quadratic(part, h, context):
            p = resolved(part)
            needed = 2 * (p.degree * h.head_dim + p.summed(h.value_dim)) * h.n_heads * (pairs + context)
            total += (needed - _score_flops(part, model.d_model, context)) // context
    return total


def training_flops(model: Model, context: int) -> int:
    """Return the FLOPs of a training step, a token: a backward pass costs two forward ones; recomputation is free."""
    return 3 * forward_flops(model, context)


def mixer_matrices(mixer: SoftmaxAttention | LinearAttention, d_model: int) -> int:
    """Return the number of weights in the matrices of an attention layer."""
    h = heads(mixer, d_model)
    if isinstance(mixer, SoftmaxAttention):
        return d_model * h.head_dim * (2 * h.n_heads + 2 * h.n_kv_heads)
    p, keys, values = resolved(mixer), h.n_heads * h.head_dim, h.n_heads * h.value_dim
    decay = {
        "none": 0,
        "fixed": 0,
        "sigmoid": d_model * h.n_heads,
        "step": d_model * h.n_heads,
        "channel_sigmoid": (d_model + keys) * GLA_RANK,
        "channel_step": (d_model + keys) * h.head_dim,
    }[p.decay]
    beta = d_model * h.n_heads if p.written == "beta" else 0
    gate = d_model * values if p.gate_rank == "full" else (d_model + values) * h.value_dim
    gate = 0 if p.output_gate == "none" else gate
    return d_model * (2 * p.branches * h.n_kv_heads * h.head_dim + 2 * values) + decay + beta + gate


def _is_quadratic(mixer: LinearAttention, h: Heads, context: int) -> bool:
    p = resolved(mixer)
    if p.update == "delta" or p.decayed == "channel":
        return False
    return auto_chunk(context, (h.head_dim,) * p.degree, p.summed(h.value_dim), initial=False, final=False) >= context


def _mixer_vectors(mixer: SoftmaxAttention | LinearAttention, d_model: int) -> int:
    """Return the number of trained weights of an attention layer that stand in no matrix."""
    if isinstance(mixer, SoftmaxAttention):
        return 0
    h, p = heads(mixer, d_model), resolved(mixer)
    channels, values = h.n_heads * h.head_dim, h.n_heads * h.value_dim
    decay = {
        "none": 0,
        "fixed": 0,
        "sigmoid": h.n_heads,
        "step": 2 * h.n_heads,
        "channel_sigmoid": channels,
        "channel_step": h.n_heads + channels,
    }[p.decay]
    convolution = (p.taps + p.taps_bias) * _channels(p, h)
    gain = {"rms": h.value_dim, "gated_rms": values}.get(p.output_norm, 0) if p.gain else 0
    return decay + convolution + gain + (h.n_heads if p.skip else 0)


def _channels(p: Preset, h: Heads) -> int:
    """Return the channels of the short convolution, if there is one."""
    return 2 * p.branches * h.n_kv_heads * h.head_dim + h.n_heads * h.value_dim if p.taps else 0


def _score_flops(mixer: SoftmaxAttention | LinearAttention, d_model: int, context: int) -> int:
    h = heads(mixer, d_model)
    if isinstance(mixer, SoftmaxAttention):
        return 4 * h.n_heads * context * context * h.head_dim
    p = resolved(mixer)
    return linear_attention_flops(
        1,
        context,
        h.n_heads,
        (h.head_dim,) * p.degree,
        p.summed(h.value_dim),
        decay=p.decayed,
        update=p.update,
        final_state=False,
    )
