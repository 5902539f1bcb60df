"""The number formats activations are cast to: what a code is, what a scale is, and what shares one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch

from tensorformer.errors import ConfigError, suggest


@final
@dataclass(frozen=True)
class Format:
    """A number format: h ≈ code · scale, with one scale a group.

    Args:
        name: the name it is asked for by.
        bits: of one code.
        codes: the dtype of the codes; a 4-bit code shares a byte with its neighbour.
        max: the largest code, as a number.
        group: neighbours along the last axis that share a scale; None where the caller chooses, the whole token
            or so many.
        scale: the dtype of the scales, which is also how they are chosen: float32, a power of two, or an e4m3.
        description: the rule, in words.
        source: where it is defined.
    """

    name: str
    bits: int
    codes: torch.dtype
    max: float
    group: int | None
    scale: torch.dtype
    description: str
    source: str

    def group_of(self, width: int, group: int | None) -> int:
        """Return how many of ``width`` neighbours share a scale, where ``group`` was asked for.

        Raises:
            ConfigError: ``group`` is not a positive integer, or not the one the format prescribes.
        """
        if group is None:
            return self.group or max(width, 1)
        if isinstance(group, bool) or not isinstance(group, int | torch.SymInt) or group < 1:
            raise ConfigError(f"group={group!r}: write how many neighbours share a scale, or None for the whole token")
        if self.group is not None and group != self.group:
            raise ConfigError(f"group={group}: {self.name} has groups of {self.group}; leave group out")
        return group

    def code_width(self, width: int) -> int:
        """Return the last axis of the codes of ``width`` numbers."""
        return -(-width // 2) if self.bits == 4 else width


def known(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}{suggest(name, FORMATS)}")
    return FORMATS[name]


def _table(*formats: Format) -> Mapping[str, Format]:
    return MappingProxyType({f.name: f for f in formats})


# fmt: off
FORMATS = _table(
    Format("int8", 8, torch.int8, 127.0, None, torch.float32,
           "symmetric, −127 … 127; scale = amax/127", "SmoothQuant, arXiv:2211.10438"),
    Format("fp8_e4m3", 8, torch.float8_e4m3fn, 448.0, None, torch.float32,
           "finite, ±448, 3 bits of mantissa; scale = amax/448", "arXiv:2209.05433"),
    Format("fp8_e5m2", 8, torch.float8_e5m2, 57344.0, None, torch.float32,
           "±57344, 2 bits of mantissa; scale = amax/57344", "arXiv:2209.05433"),
    Format("mxfp8", 8, torch.float8_e4m3fn, 448.0, 32, torch.float8_e8m0fnu,
           "e4m3 in groups of 32; scale = 2^(⌊log₂ amax⌋ − 8)", "OCP Microscaling Formats 1.0, section 6.3"),
    Format("nvfp4", 4, torch.uint8, 6.0, 16, torch.float8_e4m3fn,
           "e2m1 in groups of 16; scale = e4m3(amax/6/tensor_scale), under one float32 a tensor", "arXiv:2509.25149"),
)
# fmt: on
