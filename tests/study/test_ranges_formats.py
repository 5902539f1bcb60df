"""What formats do to the output of a down projection, against the casts written out plainly in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tensorformer.study import ranges_formats
from tensorformer.study.ranges_formats import FormatEffects
from tensorformer.study.ranges_result import Effect

Array = np.ndarray
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def by_amax(group: int | None, most: float, to_code: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return the cast whose scale is amax/most over each group of a row."""

    def cast(h: Array) -> Array:
        out = np.zeros_like(h)
        for first in range(0, h.shape[1], group or h.shape[1]):
            part = h[:, first : first + (group or h.shape[1])]
            scale = np.maximum(np.abs(part).max(1, keepdims=True) / most, 1e-38)
            out[:, first : first + part.shape[1]] = to_code(part / scale) * scale
        return out

    return cast


def fp8(dtype: torch.dtype) -> Callable[[Array], Array]:
    return lambda q: torch.from_numpy(q).float().to(dtype).double().numpy()


def mxfp8(h: Array) -> Array:
    out = np.zeros_like(h)
    for first in range(0, h.shape[1], 32):
        part = h[:, first : first + 32]
        scale = 2.0 ** (np.floor(np.log2(np.abs(part).max(1, keepdims=True))) - 8)
        out[:, first : first + 32] = fp8(torch.float8_e4m3fn)(np.clip(part / scale, -448, 448)) * scale
    return out


def nvfp4(h: Array) -> Array:
    whole = np.abs(h).max() / (448 * 6)
    out = np.zeros_like(h)
    for first in range(0, h.shape[1], 16):
        part = h[:, first : first + 16]
        scale = np.clip(np.abs(part).max(1, keepdims=True) / 6 / whole, 2.0**-6, 448)
        scale = fp8(torch.float8_e4m3fn)(scale) * whole
        quotient = np.abs(part / scale)[..., None]
        out[:, first : first + 16] = np.sign(part) * E2M1[np.abs(quotient - E2M1).argmin(-1)] * scale
    return out


CASTS = {
    "int8": by_amax(None, 127, np.round),
    "int8/128": by_amax(128, 127, np.round),
    "fp8_e4m3": by_amax(None, 448, fp8(torch.float8_e4m3fn)),
    "fp8_e5m2": by_amax(None, 57344, fp8(torch.float8_e5m2)),
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


def down_projection(d_ff: int, d_model: int = 24, bias: bool = False) -> nn.Linear:
    return nn.Linear(d_ff, d_model, bias=bias)


def effects(down: nn.Linear, *batches: Tensor) -> dict[str, Effect]:
    meter = FormatEffects(down)
    for batch in batches:
        meter.update(batch)
    return {e.label: e for e in meter.results()}


def check(down: nn.Linear, *batches: Tensor) -> None:
    """Fail unless every figure is what the plain casts give."""
    w = down.weight.detach().double().numpy()
    b = 0 if down.bias is None else down.bias.detach().double().numpy()
    found = effects(down, *batches)
    assert found.keys() == CASTS.keys()
    for label, cast in CASTS.items():
        h = [batch.double().numpy() for batch in batches]
        y = np.concatenate([part @ w.T + b for part in h])
        e = np.concatenate([(cast(part) - part) @ w.T for part in h])
        signal, noise = (y**2).sum(1), (e**2).sum(1)
        got = found[label]
        assert (got.tokens, got.left_out) == (len(y), 0)
        assert got.snr_db == pytest.approx(10 * math.log10(signal.sum() / noise.sum()), abs=0.05), label
        assert got.token_snr_db == pytest.approx((10 * np.log10(signal / noise)).mean(), abs=0.05), label
        assert got.error == pytest.approx(math.sqrt(noise.mean()), rel=0.01), label
        assert got.worst_token == pytest.approx(math.sqrt((noise / signal).max()), rel=0.02), label


@pytest.mark.parametrize("d_ff", [7, 63, 128, 257, 1368])
@pytest.mark.parametrize("bias", [False, True])
def test_every_figure_equals_direct_computation(d_ff: int, bias: bool) -> None:
    down = down_projection(d_ff, bias=bias)
    h = torch.randn(33, d_ff) * torch.randn(33, d_ff).exp()
    check(down, h)
    check(down, h[:20], 3 * h[20:])


@pytest.mark.parametrize(
    "broken",
    [
        lambda e, signal, noise: (signal, noise * 1.05),
        lambda e, signal, noise: (signal.flip(0), noise),
        lambda e, signal, noise: (noise, signal),
    ],
)
def test_a_broken_ratio_is_caught(
    broken: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ranges_formats._Noise.update
    monkeypatch.setattr(ranges_formats._Noise, "update", lambda self, s, n: right(self, *broken(self, s, n)))
    with pytest.raises(AssertionError):
        check(down_projection(257), torch.randn(33, 257) * torch.linspace(1, 5, 33)[:, None])


def test_a_product_that_every_format_holds_has_no_error() -> None:
    h = torch.tensor([[1.0, -1, 0, 1], [0, 0, 0, 0]]).repeat(1, 40)
    for e in effects(down_projection(160), h).values():
        assert e.error == pytest.approx(0, abs=1e-6)
        assert (e.worst_token or 0) < 1e-6
        assert e.snr_db is None or e.snr_db > 120


def test_zeros_alone_have_neither_signal_nor_error() -> None:
    for e in effects(down_projection(40), torch.zeros(3, 40)).values():
        assert (e.snr_db, e.token_snr_db, e.error, e.worst_token, e.tokens) == (None, None, 0, 0, 3)


def test_tokens_that_are_not_finite_are_left_out_and_disturb_no_other() -> None:
    down, h = down_projection(64), torch.randn(6, 64)
    dirty = h.clone()
    dirty[1, 3], dirty[4, 0] = math.nan, math.inf
    clean = effects(down, h[[0, 2, 3, 5]])
    for label, e in effects(down, dirty).items():
        assert (e.tokens, e.left_out) == (4, 2)
        assert e.snr_db == pytest.approx(clean[label].snr_db)
        assert e.worst_token == pytest.approx(clean[label].worst_token)
    for e in effects(down, dirty[[1, 4]]).values():
        assert (e.snr_db, e.token_snr_db, e.error, e.worst_token, e.tokens, e.left_out) == (None,) * 4 + (0, 2)


def test_an_output_of_zero_that_does_not_stay_zero_has_no_finite_error() -> None:
    down = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        down.weight.copy_(torch.tensor([[1.0, 1.0, -1.0]]))
    found = effects(down, torch.tensor([[1.0, 0.125, 1.125]]))  # 1 + ⅛ − 1⅛ is 0, and its int8 codes are not
    assert found["int8"].worst_token is None
    assert found["int8"].error


def test_the_worst_token_is_the_planted_one() -> None:
    h = torch.randn(50, 256)
    h[17] = 1e-3
    h[17, 0] = 1.0  # one large value takes the scale, and int8 loses the others
    down = nn.Linear(256, 8, bias=False)
    with torch.no_grad():
        down.weight[:, 0] = 0
    found = effects(down, h)
    assert found["int8"].worst_token == pytest.approx(1)
    assert (found["int8/128"].worst_token or 0) < (found["int8"].worst_token or 0)
    assert (effects(down, h[:17], h[18:])["int8"].worst_token or 1) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_and_products_of_any_dtype(dtype: torch.dtype) -> None:
    down, h = down_projection(63).to(dtype), torch.randn(5, 63).to(dtype)
    same = effects(down_projection(63).float(), h.float())
    assert effects(down, h).keys() == same.keys()
    check(down, h)
