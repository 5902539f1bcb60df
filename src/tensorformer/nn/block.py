"""One pre-norm block: a mixer over time, then a feed-forward part, each added to the residual stream."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.linear_attention import LinearAttention
from tensorformer.nn.moe import MoE
from tensorformer.nn.norm import make_norm
from tensorformer.nn.router import Routing
from tensorformer.nn.softmax_attention import SoftmaxAttention
from tensorformer.nn.state import MixerState


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + ffn(norm(x))``.

    Args:
        model: width and norm.
        mixer: which attention.
        ffn: which feed-forward part, dense or a mixture of experts.
    """

    def __init__(
        self,
        model: schema.Model,
        mixer: schema.SoftmaxAttention | schema.LinearAttention,
        ffn: schema.FeedForward | schema.MoE,
    ) -> None:
        super().__init__()
        kind = SoftmaxAttention if isinstance(mixer, schema.SoftmaxAttention) else LinearAttention
        self.mixer_norm = make_norm(model)
        self.mixer = kind(mixer, model.d_model, model.norm_eps)  # pyright: ignore[reportArgumentType]
        self.ffn_norm = make_norm(model)
        self.ffn = MoE(ffn, model.d_model) if isinstance(ffn, schema.MoE) else FeedForward(ffn, model.d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: MixerState | None = None,
        segments: Int[Tensor, "b t"] | None = None,
        routings: list[Routing] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], MixerState | None]:
        """Return the residual stream after the block, and the mixer's state if one was given.

        A mixture of experts appends to ``routings`` how it routed the tokens.
        """
        y, state = self.mixer(self.mixer_norm(x), state, segments)
        x = x + y
        if isinstance(self.ffn, MoE):
            real = None if segments is None else segments >= 0
            return x + self.ffn(self.ffn_norm(x), real, routings), state
        return x + self.ffn(self.ffn_norm(x)), state
