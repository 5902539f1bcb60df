"""Activations that couple a row's features: PolyNorm, Gemma 3n's sparse GELU, BitNet's inner norm.

Each is a module ``forward(g, u)``, or ``forward(u)`` where there is no gate. Statistics of a row are taken in float32
or better, whatever the input's dtype.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config.row_activations import RowActivation, sparsity_cutoff
from tensorformer.errors import GateError
from tensorformer.gates import SCALARS
from tensorformer.nn.norm import RMSNorm

EPS = 1e-6


class PolyNorm(nn.Module):
    """``w₁ x³/rms(x³) + w₂ x²/rms(x²) + w₃ x/rms(x) + b``: a cubic of the row's direction, learned.

    With rms(z) = √(mean(z²) + 10⁻⁶) over the last axis. The order of ``weight`` is that of its authors' checkpoints.
    Source: Zhuo et al. 2024 (arXiv 2411.03884).
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Float[Tensor, "*shape f"]) -> Float[Tensor, "*shape f"]:
        """Return the activation of every row."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # By the row's largest number, where that is over 1: x⁶ overflows from a few million on, and its root does not.
        size = wide.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
        z = wide / size
        total = self.bias.expand_as(z)
        for weight, power in zip(self.weight, (3, 2, 1), strict=True):
            term = z**power
            rms = (term.square().mean(-1, keepdim=True) + EPS * size.pow(-2 * power)).sqrt()
            total = total + weight * (term / rms)
        return total.to(x.dtype)


class PolyNormGLU(nn.Module):
    """``polynorm(g)·u``."""

    def __init__(self) -> None:
        super().__init__()
        self.polynorm = PolyNorm()

    def forward(self, g: Float[Tensor, "*shape f"], u: Float[Tensor, "*shape f"]) -> Float[Tensor, "*shape f"]:
        """Return the activation of every row."""
        return self.polynorm(g) * u


class SparseGEGLU(nn.Module):
    """``gelu_tanh(max(0, g − (mean(g) + z·std(g))))·u``, z the quantile of the normal law at ``sparsity``.

    Of a row of normal numbers the share ``sparsity`` becomes exactly zero. The standard deviation is that of the row
    itself (divided by f, not f − 1). Source: Gemma 3n.
    """

    def __init__(self, sparsity: float) -> None:
        super().__init__()
        if not 0 < sparsity < 1:
            raise GateError(f"sparsity = {sparsity}: write a share between 0 and 1")
        self.cutoff = sparsity_cutoff(sparsity)

    def forward(self, g: Float[Tensor, "*shape f"], u: Float[Tensor, "*shape f"]) -> Float[Tensor, "*shape f"]:
        """Return the activation of every row."""
        wide = g.to(torch.promote_types(g.dtype, torch.float32))
        std, mean = torch.std_mean(wide, dim=-1, keepdim=True, correction=0)
        kept = torch.relu(wide - (mean + self.cutoff * std))
        return SCALARS["gelu_tanh"](kept).to(g.dtype) * u


class NormedReLU2GLU(nn.Module):
    """``RMSNorm(max(0, g)²·u)`` with gain. Source: Ma et al. 2025 (arXiv 2504.12285)."""

    def __init__(self, d_ff: int) -> None:
        super().__init__()
        self.norm = RMSNorm(d_ff, eps=EPS)

    def forward(self, g: Float[Tensor, "*shape f"], u: Float[Tensor, "*shape f"]) -> Float[Tensor, "*shape f"]:
        """Return the activation of every row."""
        wide = torch.promote_types(g.dtype, torch.float32)
        return self.norm(SCALARS["relu2"](g.to(wide)) * u.to(wide)).to(g.dtype)


def make_row_activation(activation: RowActivation, d_ff: int) -> nn.Module:
    """Return the module of a row activation at a hidden width."""
    match activation.name:
        case "polynorm":
            return PolyNorm()
        case "polynorm_glu":
            return PolyNormGLU()
        case "geglu_tanh_sparse":
            return SparseGEGLU(activation.parameters["sparsity"])
        case "relu2_glu_norm":
            return NormedReLU2GLU(d_ff)
    raise AssertionError(activation.name)
