"""What a cast, and the fused operator, are held to: functions that list what is violated, for real and broken alike.

The grids are written out here from the definitions of the formats, and the nearest code is found by trying all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.act_quant import FORMATS, Quantised, dequantise

Cast = Callable[[Tensor, str, int | None], Quantised]
Fused = Callable[..., Quantised]
FREE = [name for name, spec in FORMATS.items() if spec.group is None]
CASES = [(name, group) for name in FREE for group in (None, 1, 16, 20)] + [("mxfp8", None), ("nvfp4", None)]
SIZES = (1, 3, 7, 63, 257, 1368)


def minifloat(exponent_bits: int, mantissa_bits: int, top: float) -> list[float]:
    """Return every non-negative finite number of a small float, ascending, with the usual bias, up to ``top``."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = range(2**mantissa_bits)
    numbers = [m * 2.0 ** (1 - bias - mantissa_bits) for m in steps]
    for e in range(1, 2**exponent_bits):
        numbers += [(1 + m / 2**mantissa_bits) * 2.0 ** (e - bias) for m in steps]
    return [n for n in numbers if n <= top]


GRIDS = {
    "int8": [float(n) for n in range(128)],
    "fp8_e4m3": minifloat(4, 3, 448.0),
    "fp8_e5m2": minifloat(5, 2, 57344.0),
    "mxfp8": minifloat(4, 3, 448.0),
    "nvfp4": minifloat(2, 1, 6.0),
}


def groups_of(width: int, format: str, group: int | None) -> list[slice]:
    """Return the places of each group along the last axis."""
    size = FORMATS[format].group or group or max(width, 1)
    return [slice(i, min(i + size, width)) for i in range(0, width, size)]


def exact_scale(format: str, amax: float) -> float:
    """Return the scale of a group, worked out in float64 from the definition (nvfp4: the nearest e4m3)."""
    top = GRIDS[format][-1]
    if format == "mxfp8":
        return 2.0 ** max(math.floor(math.log2(amax)) - 8, -127) if amax else 2.0**-127
    if format == "nvfp4":
        normal = [n for n in GRIDS["fp8_e4m3"] if n >= 2.0**-6]
        return min(normal, key=lambda n: abs(n - amax / top))
    return max(amax / top, 2.0**-126)


def nearest_error(h: Tensor, scale: Tensor, format: str) -> Tensor:
    """Return the least |code · scale − h| any code can have, in float64, code by code."""
    grid = torch.tensor(GRIDS[format], dtype=torch.float64)
    best = torch.full_like(h, math.inf, dtype=torch.float64)
    for number in grid:
        best = torch.minimum(best, (h.abs() - number * scale).abs())
    return best


def steps(scale: Tensor, format: str, width: int, group: int | None) -> Tensor:
    """Return the scale of every element, in float64."""
    parts = [
        scale[..., i : i + 1].double().expand(*scale.shape[:-1], p.stop - p.start)
        for i, p in enumerate(groups_of(width, format, group))
    ]
    return torch.cat(parts, -1) if parts else scale.double()


def bits(t: Tensor) -> Tensor:
    """Return the bytes of ``t``."""
    return t.contiguous().view(torch.uint8)


def same(a: Quantised, b: Quantised) -> bool:
    """Return whether codes and scales are equal, bit for bit, any NaN being equal to any."""
    return all(
        s.shape == t.shape and s.dtype == t.dtype
        and (torch.equal(bits(s), bits(t)) or torch.equal(s.float().nan_to_num(7e7), t.float().nan_to_num(7e7)))
        for s, t in zip(a, b, strict=True)
    )  # fmt: skip


def error_violations(h: Tensor, result: Quantised, format: str, group: int | None, slack: float = 0.0) -> list[str]:
    """List where codes are not the nearest to the finite ``h``, or scales not what the definition says.

    Args:
        h: the truth, in float64. slack: relative error that ``h`` itself may have had.
    """
    width, found = h.shape[-1], []
    codes, scale = result
    spread = steps(scale, format, width, group)
    error = (dequantise(codes, scale, format, group, torch.float64, width=width) - h).abs()
    allowed = nearest_error(h, spread, format) + (slack + 4e-7) * h.abs() + slack * spread
    if not bool((error <= allowed).all()):
        worst = int((error - allowed).argmax())
        found.append(f"{format}: {h.flatten()[worst]} is {error.flatten()[worst]} off its code's number")
    for i, place in enumerate(groups_of(width, format, group)):
        amax = h[..., place].abs().amax(-1)
        for got, most in zip(scale[..., i].flatten().tolist(), amax.flatten().tolist(), strict=True):
            low, high = (exact_scale(format, most * (1 + s * (slack + 4e-7))) for s in (-1, 1))
            if not low * (1 - 4e-7) <= got <= high * (1 + 4e-7):
                found.append(f"{format}: a group of largest magnitude {most} has scale {got}, not {high}")
    return found


def cast_violations(cast: Cast, format: str, group: int | None, width: int = 77) -> list[str]:
    """List the laws that ``cast`` breaks on a few tokens of very different size."""
    torch.manual_seed(width)
    h = torch.randn(5, width) * torch.logspace(-1, 1, 5)[:, None]
    h[2, : width // 2] = 0
    result = cast(h, format, group)
    found = error_violations(h.double(), result, format, group)
    back = dequantise(*result, format, group, width=width)
    if not same(cast(back, format, group)._replace(scale=result.scale), result):
        found.append(f"{format}: what comes back has other codes")
    if not torch.equal(dequantise(*cast(-h, format, group), format, group, width=width), -back):
        found.append(f"{format}: −h is not cast to −(cast of h)")
    if format != "nvfp4":
        codes, scale = cast(h * 8, format, group)
        zero = result.scale.float() <= 2.0**-126
        if not torch.equal(bits(codes), bits(result.codes)) or not torch.equal(
            scale.float().masked_fill(zero, 0), (result.scale.float() * 8).masked_fill(zero, 0)
        ):
            found.append(f"{format}: 8·h has other codes, or a scale that is not 8 times as large")
    for value in (math.nan, math.inf, 1e30):
        disturbed = h.clone()
        disturbed[1, 0] = value
        other = dequantise(*cast(disturbed, format, group), format, group, width=width)
        first = groups_of(width, format, group)[0].stop
        if not torch.equal(other[1, first:], back[1, first:]) or not torch.equal(other[2:], back[2:]):
            found.append(f"{format}: {value} in one group changes another")
    return found


def fused_violations(fused: Fused, gate: Gate, format: str, group: int | None, width: int = 61) -> list[str]:
    """List where ``fused`` (called as ``act_quant`` is) is far from φ(g)·ψ(u)·weight in float64."""
    torch.manual_seed(width)
    x = torch.randn(6, 2 * width)
    weight = torch.rand(6) + 0.1
    g, u = x.double().chunk(2, -1)
    truth = gate(g, u) * weight.double()[:, None]
    result = fused(x, gate, format=format, group=group, layout="gate_up", weight=weight)
    return error_violations(truth, result, format, group, slack=2e-6)
