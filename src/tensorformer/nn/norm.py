"""Normalisation: RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) with and without gain, and LayerNorm by name."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config.schema import Model


def make_norm(model: Model) -> nn.Module:
    """Return the norm that stands before every part of a block: RMSNorm with gain, or LayerNorm with gain and bias."""
    kind = RMSNorm if model.norm == "rms_norm" else nn.LayerNorm
    return kind(model.d_model, eps=model.norm_eps)


class RMSNorm(nn.RMSNorm):
    """``x / √(mean(x²) + eps) · weight`` over the last axis."""

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """Return the normed input, in its own dtype."""
        return rms_norm(x, self.weight, cast(float, self.eps))


def unit_rms(x: Float[Tensor, "*shape d"], eps: float) -> Float[Tensor, "*shape d"]:
    """Return ``x / √(mean(x²) + eps)`` over the last axis: RMSNorm without gain."""
    return rms_norm(x, None, eps)


def unit_l2(x: Float[Tensor, "*shape d"], eps: float, length: float = 1.0) -> Float[Tensor, "*shape d"]:
    """Return ``length · x / √(Σx² + eps)`` over the last axis: never longer than ``length``."""
    d = x.shape[-1]
    return unit_rms(x, eps / d) * (length * d**-0.5)


def rms_norm(x: Float[Tensor, "*shape d"], weight: Float[Tensor, " d"] | None, eps: float) -> Float[Tensor, "*shape d"]:
    """Return ``x / √(mean(x²) + eps) · weight``.

    Accelerators and compilers fuse torch's own. Eager torch on a CPU runs it as a dozen passes that keep several
    copies of ``x``; there this takes a third of the time and keeps ``x`` alone.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = widened(x)
        y = wide * _inverse_rms(wide, eps)
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        # With r = 1/rms: dx = r·(w·dy) − x·r³/d · Σ w·dy·x and dw = Σ_rows r·dy·x; both sums are one product's.
        # All of it in differentiable operations, and r anew from x, so that it can be differentiated again.
        x, weight = ctx.saved_tensors
        wide, dy = widened(x), widened(grads[0])
        r, d = _inverse_rms(wide, ctx.eps), x.shape[-1]
        product = (dy * wide).flatten(0, -2)
        if weight is None:
            along, dw, dx = product.sum(-1, keepdim=True), None, dy * r
        else:
            w = weight.to(wide.dtype)
            along, dw = product @ w[:, None], (r.reshape(1, -1) @ product)[0].to(weight.dtype)
            dx = (dy * w) * r
        dx = torch.addcmul(dx, wide, along.view(r.shape) * r.pow(3) / -d)
        return dx.to(x.dtype), dw, None


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or as it is where that is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
