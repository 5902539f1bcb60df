"""The feed-forward part: two matrices around a scalar activation, or three around a gate."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.check import feed_forward_activation
from tensorformer.gates import Gate


class FeedForward(nn.Module):
    """``down(φ(gate(x)) · ψ(up(x)))`` for a gate (Shazeer 2020, arXiv 2002.05202), ``down(φ(up(x)))`` for a scalar.

    With the bilinear gate this is the third-order tensor T[l,i,j] = Σ_f down[l,f] gate[f,i] up[f,j], contracted
    with x twice.

    Args:
        config: the activation and the hidden width.
        d_model: width of the input and the output.
    """

    def __init__(self, config: schema.FeedForward, d_model: int) -> None:
        super().__init__()
        self.activation = feed_forward_activation(config)
        if isinstance(self.activation, Gate):
            self.gate_proj = nn.Linear(d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """Return the output for every row of ``x`` on its own."""
        if isinstance(self.activation, Gate):
            return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(self.activation(self.up_proj(x)))
