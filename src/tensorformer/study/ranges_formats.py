"""What number formats for the product do to the output of the down projection."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

from tensorformer.ops.act_quant import dequantise, nvfp4_tensor_scale, quantise
from tensorformer.study.ranges_result import Effect

# Format and group; None is the format's own: a token for int8 and fp8, 32 for MXFP8, 16 for NVFP4.
CASES: tuple[tuple[str, int | None], ...] = (
    ("int8", None),
    ("int8", 128),
    ("fp8_e4m3", None),
    ("fp8_e5m2", None),
    ("mxfp8", None),
    ("nvfp4", None),
)


class FormatEffects:
    """Signal and noise of every format, over tokens that come in batches.

    NVFP4's second scale, which a whole tensor shares, is taken from each batch, its own calibration text.

    Args:
        down: the down projection; its weights are left as they are.
    """

    def __init__(self, down: nn.Linear) -> None:
        self._weight = down.weight.detach().float()
        self._bias = None if down.bias is None else down.bias.detach().float()
        self._noises = [_Noise(*f) for f in CASES]
        self._signal, self._tokens, self._left_out = 0.0, 0, 0

    def update(self, h: Float[Tensor, "tokens d_ff"]) -> None:
        """Quantise the products of some tokens and compare what becomes of them."""
        h = h.detach().float()
        y = F.linear(h, self._weight, self._bias)
        whole = h.isfinite().all(-1) & y.isfinite().all(-1)
        if not whole.all():
            self._left_out += int((~whole).sum())
            h, y = h[whole], y[whole]
        if not len(h):
            return
        signal = _squares(y)
        self._tokens += len(h)
        self._signal += float(signal.sum())
        for noise in self._noises:
            back = noise.there_and_back(h)
            noise.update(signal, _squares(F.linear(back - h, self._weight)))

    @property
    def output(self) -> float | None:
        """√(mean ‖y‖²) over tokens, y the output of the down projection; None without a token."""
        return math.sqrt(self._signal / self._tokens) if self._tokens else None

    def results(self) -> list[Effect]:
        """Return an effect a format."""
        return [noise.result(self._signal, self._tokens, self._left_out) for noise in self._noises]


class _Noise:
    """The error of one format."""

    def __init__(self, format: str, group: int | None) -> None:
        self._format, self._group = format, group
        self._total = self._worst = 0.0  # worst: squared
        self._decibels, self._with_decibels = 0.0, 0

    def there_and_back(self, h: Float[Tensor, "tokens d_ff"]) -> Float[Tensor, "tokens d_ff"]:
        whole = nvfp4_tensor_scale(h) if self._format == "nvfp4" else None
        codes, scale = quantise(h, self._format, self._group, tensor_scale=whole)
        return dequantise(codes, scale, self._format, self._group, tensor_scale=whole, width=h.shape[-1])

    def update(self, signal: Float64[Tensor, " tokens"], noise: Float64[Tensor, " tokens"]) -> None:
        self._total += float(noise.sum())
        ratio = torch.where(noise == 0, 0.0, noise / signal)  # a token of zeros that stays so has no error
        self._worst = max(self._worst, float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        usual = ratio[(ratio > 0) & ratio.isfinite()]
        self._decibels -= 10 * float(usual.log10().sum())
        self._with_decibels += len(usual)

    def result(self, signal: float, tokens: int, left_out: int) -> Effect:
        measured = tokens > 0 and math.isfinite(self._total)
        return Effect(
            format=self._format,
            group=self._group,
            snr_db=10 * math.log10(signal / self._total) if measured and signal and self._total else None,
            token_snr_db=self._decibels / self._with_decibels if self._with_decibels else None,
            error=math.sqrt(self._total / tokens) if measured else None,
            worst_token=math.sqrt(self._worst) if tokens and math.isfinite(self._worst) else None,
            tokens=tokens,
            left_out=left_out,
        )


def _squares(y: Float[Tensor, "tokens d"]) -> Float64[Tensor, " tokens"]:
    return y.double().square().sum(-1)
