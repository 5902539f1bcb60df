"""Numbers of four bits (e2m1): sign, two bits of exponent, one of mantissa; two a byte."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8


def encode(x: Tensor) -> Tensor:
    """Return the nearest code of each number, the even one on a tie, as uint8 in 0 … 15; |x| ≤ 6, no NaN.

    The grid is even in steps of ½ up to 2, of 1 up to 4 and of 2 up to 6, and the codes count on from one stretch
    to the next: each stretch adds its own steps, and rounding to an even step is rounding to an even code.
    """
    size = x.abs()
    code = (size * 2).clamp_(max=4).round_()
    code += size.clamp(2, 4).round_() - 2
    code += (size / 2).clamp_(2, 3).round_() - 2
    # The sign as a bit: −0 has one too.
    return code.to(torch.uint8) | ((x.view(torch.int32) >> 28) & SIGN).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Return the numbers, in float32, of codes 0 … 15."""
    values = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float32, device=codes.device)
    return values[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Return (..., ⌈n/2⌉) bytes: the first of two codes in the low four bits; after an odd last one, zero."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Return the (..., 2·n) codes of (..., n) bytes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
