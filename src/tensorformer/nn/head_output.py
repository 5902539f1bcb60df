"""What stands between linear attention's sums and its output projection: a norm on each head, and a gate."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.config.presets import Preset
from tensorformer.config.shapes import Heads
from tensorformer.gates import SCALARS, Scalar
from tensorformer.nn.decay import LowRank
from tensorformer.nn.norm import rms_norm

OUTPUT_GATES = {"sigmoid": "sigmoid", "swish": "silu"}  # an output gate -> its activation


class HeadOutput(nn.Module):
    """``norm(y) · gate(W x)``, or ``norm(y · gate(W x))`` over all heads for ``gated_rms`` (Mamba-2).

    The norm is one of

    - ``none`` (and ``row``, a sum that has been divided by its weights before it comes here);
    - ``position``: y over the number of keys that it is a sum of;
    - ``rms``: RMSNorm over each head, with or without gain.

    Args:
        preset: which norm and gate.
        heads: sizes.
        d_model: width of x.
        eps: of the norm.
    """

    def __init__(self, preset: Preset, heads: Heads, d_model: int, eps: float) -> None:
        super().__init__()
        self.norm, self.eps, width = preset.output_norm, eps, heads.n_heads * heads.value_dim
        self.activation: Scalar | None = None
        if preset.output_gate != "none":
            self.activation = SCALARS[OUTPUT_GATES[preset.output_gate]]
            low = preset.gate_rank == "value_dim"
            self.gate_proj = LowRank(d_model, heads.value_dim, width) if low else nn.Linear(d_model, width, bias=False)
        self.weight = None
        if preset.gain and self.norm in ("rms", "gated_rms"):
            self.weight = nn.Parameter(torch.ones(width if self.norm == "gated_rms" else heads.value_dim))

    @property
    def second_moment(self) -> float:
        """The mean square of the output of a new model, where its norm fixes it, else 1."""
        return self.activation.second_moment if self.activation and self.norm == "rms" else 1.0

    def forward(
        self, y: Float[Tensor, "b t h v"], x: Float[Tensor, "b t d"], position: Int[Tensor, "*b t"]
    ) -> Float[Tensor, "b t hv"]:
        """Return what the output projection takes.

        Args:
            y: the heads' sums.
            x: the layer's input, which the gate is made of.
            position: of each token, from 0.
        """
        if self.norm == "position":
            count = (position + 1).to(torch.promote_types(y.dtype, torch.float32))
            y = (y / count[..., None, None]).to(y.dtype)
        elif self.norm == "rms":
            y = rms_norm(y, self.weight, self.eps)
        y = y.flatten(2)
        if self.activation is not None:
            y = y * self.activation(self.gate_proj(x))
        return rms_norm(y, self.weight, self.eps) if self.norm == "gated_rms" else y
