"""What a feed-forward part weighs, dense or a mixture, and how much of it a token meets."""

from __future__ import annotations

from collections.abc import Callable

from tensorformer.config.activations import feed_forward_activation, is_gated, learned_parameters
from tensorformer.config.row_activations import RowActivation
from tensorformer.config.schema import Experts, FeedForward, MoE


def feed_forward_weights(ffn: FeedForward | MoE, d_model: int) -> int:
    """Return the number of trained weights."""
    if isinstance(ffn, MoE):
        return _outside(ffn, d_model) + ffn.n_experts * _weights(ffn.routed, ffn.latent or d_model)
    return _weights(ffn, d_model)


def active_feed_forward_weights(ffn: FeedForward | MoE, d_model: int) -> int:
    """Return the number of trained weights that one token meets: of a mixture, those of its experts and its router."""
    if isinstance(ffn, MoE):
        return _outside(ffn, d_model) + ffn.router.top_k * _weights(ffn.routed, ffn.latent or d_model)
    return _weights(ffn, d_model)


def feed_forward_products(ffn: FeedForward | MoE, d_model: int) -> int:
    """Return the multiply-adds of a token."""
    if not isinstance(ffn, MoE):
        return _matrices(ffn, d_model)
    width = ffn.latent or d_model
    return _around(ffn, d_model) + ffn.router.top_k * _matrices(ffn.routed, width) + _shared(ffn, d_model, _matrices)


def _outside(ffn: MoE, d_model: int) -> int:
    """Return the weights of all but the routed experts."""
    bias = ffn.n_experts if ffn.router.bias else 0
    return _around(ffn, d_model) + bias + _shared(ffn, d_model, _weights)


def _around(ffn: MoE, d_model: int) -> int:
    """Return the weights of the router's matrix and of the projections to the latent width and back."""
    return d_model * ffn.n_experts + 2 * d_model * (ffn.latent or 0)


def _shared(ffn: MoE, d_model: int, count: Callable[[FeedForward | Experts, int], int]) -> int:
    return 0 if ffn.shared is None else ffn.n_shared_experts * count(ffn.shared, d_model)


def _weights(part: FeedForward | Experts, d_model: int) -> int:
    activation = feed_forward_activation(part)
    own = activation.weights(part.d_ff) if isinstance(activation, RowActivation) else 0
    biases = part.d_ff * (2 if is_gated(activation) else 1) + d_model if part.bias else 0
    return _matrices(part, d_model) + own + biases + len(learned_parameters(part))


def _matrices(part: FeedForward | Experts, d_model: int) -> int:
    """Return the weights of three matrices around a gate, or of two around a scalar."""
    return d_model * part.d_ff * (3 if is_gated(feed_forward_activation(part)) else 2)
