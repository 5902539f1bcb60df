"""What linear attention forgets: the logarithm of each step's decay, from constants or from the input."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config.presets import GLA_RANK, GLA_TEMPERATURE, Preset
from tensorformer.config.shapes import Heads
from tensorformer.nn.constants import Constants
from tensorformer.nn.norm import widened

SIGMOID_BIAS = 4.0  # σ(4) = 0.982: a memory of some fifty tokens to begin with
RATES = (1.0, 16.0)  # e^A of the first model, uniform (Mamba-2)
STEPS = (1e-3, 1e-1)  # Δ of the first model, log-uniform (Mamba-2)

Decays = tuple[Float[Tensor, "b t h *k"] | None, Float[Tensor, "b t h"] | None]


def make_decay(preset: Preset, heads: Heads, d_model: int) -> nn.Module | None:
    """Return what maps x to (log decay, what v is to be scaled by), or None where nothing decays."""
    match preset.decay:
        case "none":
            return None
        case "fixed":
            return FixedDecay(heads.n_heads)
        case "sigmoid":
            return SigmoidDecay(nn.Linear(d_model, heads.n_heads), ())
        case "step":
            scaled = preset.written == "step"
            return StepDecay(nn.Linear(d_model, heads.n_heads, bias=False), heads.n_heads, (), scaled)
        case "channel_sigmoid":
            projection = LowRank(d_model, GLA_RANK, heads.n_heads * heads.head_dim, bias=True)
            return SigmoidDecay(projection, (heads.n_heads, heads.head_dim), GLA_TEMPERATURE, bias=0.0)
        case "channel_step":
            projection = LowRank(d_model, heads.head_dim, heads.n_heads * heads.head_dim)
            return StepDecay(projection, heads.n_heads, (heads.head_dim,), False)


class LowRank(nn.Module):
    """``W₂ W₁ x + b``: a projection through few features.

    Args:
        inputs, rank, outputs: widths.
        bias: whether there is one.
    """

    def __init__(self, inputs: int, rank: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=bias)

    def forward(self, x: Float[Tensor, "*shape inputs"]) -> Float[Tensor, "*shape outputs"]:
        """Return the projection."""
        return self.up(self.down(x))


class FixedDecay(Constants):
    """``log(1 − 2^(−5−i))`` for head i (Sun et al. 2023)."""

    def __init__(self, n_heads: int) -> None:
        super().__init__([math.log1p(-(2.0 ** (-5 - i))) for i in range(n_heads)])

    def forward(self, x: Float[Tensor, "b t d"]) -> Decays:
        """Return one number a head, the same at every step."""
        return self.values.expand(*x.shape[:2], -1), None


class SigmoidDecay(nn.Module):
    """``log σ(Wx + b) / temperature``.

    Args:
        projection: W and b.
        channels: (heads, features) of its output where there is one number a channel.
        temperature: the decay is this root of the sigmoid.
        bias: b to begin with.
    """

    def __init__(
        self, projection: nn.Module, channels: tuple[int, ...], temperature: float = 1.0, bias: float = SIGMOID_BIAS
    ) -> None:
        super().__init__()
        self.proj, self.channels, self.temperature, self.first_bias = projection, channels, temperature, bias

    def first_values(self, draws: torch.Generator) -> None:
        """Fill the bias."""
        for name, p in self.proj.named_parameters():
            if name.endswith("bias"):
                p.fill_(self.first_bias)

    def forward(self, x: Float[Tensor, "b t d"]) -> Decays:
        """Return one number a head, or a channel."""
        decay = F.logsigmoid(widened(self.proj(x)))
        decay = decay if self.temperature == 1 else decay / self.temperature
        return decay.unflatten(-1, self.channels) if self.channels else decay, None


class StepDecay(nn.Module):
    """``−e^A · Δ`` with the step ``Δ = softplus(Wx + b)`` and one A a head.

    Args:
        projection: W.
        n_heads: heads of the values.
        features: (head_dim,) where there is one number a channel, else ().
        scaled: whether v is to be scaled by Δ.
    """

    def __init__(self, projection: nn.Module, n_heads: int, features: tuple[int, ...], scaled: bool) -> None:
        super().__init__()
        self.proj, self.scaled = projection, scaled
        self.shape = (n_heads, *features)
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.dt_bias = nn.Parameter(torch.empty(math.prod(self.shape)))

    def first_values(self, draws: torch.Generator) -> None:
        """Draw e^A and softplus(b) from the ranges of Mamba-2."""
        low, high = RATES
        self.A_log.copy_((low + (high - low) * torch.rand(self.A_log.shape, generator=draws)).log())
        low, high = math.log(STEPS[0]), math.log(STEPS[1])
        step = (low + (high - low) * torch.rand(self.dt_bias.shape, generator=draws)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x: Float[Tensor, "b t d"]) -> Decays:
        """Return one number a head, or a channel, and Δ where it scales v."""
        step = F.softplus(widened(self.proj(x)) + self.dt_bias).unflatten(-1, self.shape)
        rate = self.A_log.to(step.dtype).exp().view(-1, *(1 for _ in self.shape[1:]))
        return -rate * step, step if self.scaled else None
