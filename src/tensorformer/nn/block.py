"""One pre-norm block: a mixer over time, then a feed-forward part, each added to the residual stream."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.linear_attention import LinearAttention
from tensorformer.nn.norm import make_norm
from tensorformer.nn.softmax_attention import SoftmaxAttention
from tensorformer.nn.state import MixerState


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + ffn(norm(x))``.

    Args:
        model: width and norm.
        mixer: which attention.
        ffn: which feed-forward part.
    """

    def __init__(
        self, model: schema.Model, mixer: schema.SoftmaxAttention | schema.LinearAttention, ffn: schema.FeedForward
    ) -> None:
        super().__init__()
        kind = SoftmaxAttention if isinstance(mixer, schema.SoftmaxAttention) else LinearAttention
        self.mixer_norm = make_norm(model)
        self.mixer = kind(mixer, model.d_model, model.norm_eps)  # pyright: ignore[reportArgumentType]
        self.ffn_norm = make_norm(model)
        self.ffn = FeedForward(ffn, model.d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: MixerState | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], MixerState | None]:
        """Return the residual stream after the block, and the mixer's state if one was given."""
        y, state = self.mixer(self.mixer_norm(x), state, segments)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), state
