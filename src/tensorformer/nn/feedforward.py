"""The feed-forward part: two matrices around a scalar activation, or three around a gate."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.activations import feed_forward_activation, is_gated, learned_parameters
from tensorformer.config.row_activations import RowActivation
from tensorformer.gates import Gate, Scalar
from tensorformer.nn.row_activations import make_row_activation
from tensorformer.ops.act_and_mul import act_and_mul


class FeedForward(nn.Module):
    """``down(φ(gate(x)) · ψ(up(x)))`` for a gate (Shazeer 2020, arXiv 2002.05202), ``down(φ(up(x)))`` for a scalar.

    With the bilinear gate this is the third-order tensor T[l,i,j] = Σ_f down[l,f] gate[f,i] up[f,j], contracted
    with x twice. An activation that needs the whole row, such as PolyNorm, is a module of its own.

    Args:
        config: the activation, with the parameters that are trained, the hidden width, and whether there are biases.
        d_model: width of the input and the output.
    """

    def __init__(self, config: schema.FeedForward, d_model: int) -> None:
        super().__init__()
        self.activation = feed_forward_activation(config)
        learned = {name: nn.Parameter(torch.tensor(value)) for name, value in learned_parameters(config).items()}
        self.learned = nn.ParameterDict(learned) if learned else None
        if isinstance(self.activation, RowActivation):
            self.row = make_row_activation(self.activation, config.d_ff)
        self.is_gated = is_gated(self.activation)
        if self.is_gated:
            self.gate_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.up_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.down_proj = nn.Linear(config.d_ff, d_model, bias=config.bias)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """Return the output for every row of ``x`` on its own."""
        up = self.up_proj(x)
        return self.down_proj(self._activate(self.gate_proj(x), up) if self.is_gated else self._activate(up))

    def _activate(self, *inputs: Tensor) -> Tensor:
        activation = self.activation
        if isinstance(activation, RowActivation):
            return self.row(*inputs)
        if self.learned is not None:
            activation = activation.bind(**dict(self.learned.items()))
        if isinstance(activation, Scalar):
            return activation(*inputs)
        assert isinstance(activation, Gate)
        return act_and_mul((inputs[0], inputs[1]), activation, impl=self._impl(activation, inputs[0]))

    @staticmethod
    def _impl(gate: Gate, g: Tensor) -> str:
        """On a CPU not "auto": with or without a native kernel built, a run that is resumed must have the same bits."""
        if g.device.type != "cpu":
            return "auto"
        # What torch has in one pass is fastest so at the sizes trained on a CPU, and keeps half as much again.
        return "reference" if gate.is_one_pass else "fast"
