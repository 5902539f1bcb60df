"""The short causal convolution that stands before newer linear attentions (Poli et al. 2023, arXiv 2302.10866)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.gates import SCALARS
from tensorformer.ops.linear_attention.segments import first_steps


class ShortConvolution(nn.Module):
    """``SiLU(Σ_j weight_j · x_(t−taps+1+j) + bias)``, each channel by itself.

    Args:
        channels: of x.
        taps: width; x and the ``taps − 1`` before it are seen.
        bias: whether there is one.
    """

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))  # as nn.Conv1d has it
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def first_values(self, draws: torch.Generator) -> None:
        """Fill the weights: uniform, as torch fills a convolution."""
        bound = 1 / math.sqrt(self.weight.shape[2])
        self.weight.copy_(torch.rand(self.weight.shape, generator=draws) * 2 * bound - bound)
        if self.bias is not None:
            self.bias.zero_()

    def empty(self, batch: int) -> Float[Tensor, "b before channels"]:
        """Return what is kept before the first token."""
        channels, _, taps = self.weight.shape
        return self.weight.new_zeros(batch, taps - 1, channels)

    def forward(
        self,
        x: Float[Tensor, "b t channels"],
        before: Float[Tensor, "b before channels"] | None = None,
        segments: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t channels"], Float[Tensor, "b before channels"]]:
        """Return the output, and the last inputs, which the next call is to be given as ``before``."""
        kept = self.weight.shape[2] - 1
        joined = F.pad(x, (0, 0, kept, 0)) if before is None else torch.cat((before.to(x.dtype), x), 1)
        # A copy of the last inputs: a view would keep all the others alive with it.
        if segments is None:
            y, last = _Taps.apply(joined, self.weight[:, 0].to(x.dtype)), joined[:, joined.shape[1] - kept :].clone()
        else:
            y, last = self._packed(joined, segments)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return SCALARS["silu"](y), last

    def _packed(
        self, joined: Float[Tensor, "b n channels"], segments: Int[Tensor, "b t"]
    ) -> tuple[Float[Tensor, "b t channels"], Float[Tensor, "b before channels"]]:
        """Convolve within documents only.

        Padding is moved to the front, so that the inputs of a document stand side by side, and those kept from the
        call before stand right before the first document, which goes on from them.
        """
        b, kept = segments.shape[0], self.weight.shape[2] - 1
        real = segments >= 0
        document = first_steps(segments).cumsum(1).masked_fill(~real, -1)
        document = torch.cat((document.new_zeros(b, kept), document), 1)
        order = (document >= 0).long().argsort(dim=1, stable=True)
        document = document.gather(1, order)
        packed = joined.gather(1, order.unsqueeze(2).expand_as(joined))
        n, y = packed.shape[1], torch.zeros_like(packed)
        for j in range(kept + 1):  # j steps back
            same = (document[:, j:] == document[:, : n - j]) & (document[:, j:] >= 0)
            term = packed[:, : n - j].masked_fill(~same.unsqueeze(2), 0) * self.weight[:, 0, kept - j].to(packed.dtype)
            y = y + F.pad(term, (0, 0, j, 0))
        back = order.argsort(1)[:, kept:]
        y = y.gather(1, back.unsqueeze(2).expand(-1, -1, y.shape[2])).masked_fill(~real.unsqueeze(2), 0)
        last, owner = packed[:, n - kept :], document[:, n - kept :]
        return y, last.masked_fill((owner != document[:, -1:]).unsqueeze(2), 0)


class _Taps(torch.autograd.Function):
    # torch's own depthwise convolution on a CPU wants channels first, and takes longer than this with its transposes.

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        taps = weight.shape[1]
        t = x.shape[1] - taps + 1
        y = x[:, :t] * weight[:, 0]
        for j in range(1, taps):
            y.addcmul_(x[:, j : j + t], weight[:, j])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (g,), taps = grads, weight.shape[1]
        dx = _Taps.apply(F.pad(g, (0, 0, taps - 1, taps - 1)), weight.flip(1))
        dw = torch.stack([(g * x[:, j : j + g.shape[1]]).sum((0, 1)) for j in range(taps)], 1)
        return dx, dw
