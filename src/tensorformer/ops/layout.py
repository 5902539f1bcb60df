"""How gate and up projections share one tensor: two views of it, never a copy, and never a guess."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest

Operand = Tensor | tuple[Tensor, Tensor]

#: What each layout means: h is made of the first and the second half, or of the even and the odd places.
LAYOUTS: dict[str, str] = {
    "gate_up": "the gate in the first half, up in the second (transformers, vLLM)",
    "up_gate": "up in the first half, the gate in the second (torch's F.glu, ScatterMoE)",
    "interleaved": "the gate at even places, up at odd ones (gpt-oss)",
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def split(x: Operand, layout: str | None) -> tuple[Tensor, Tensor]:
    """Return the gate projection g and the up projection u as views of ``x``.

    Args:
        x: (..., 2·d_ff) with a layout, or a pair (g, u) of (..., d_ff) without one; any strides.
        layout: a key of ``LAYOUTS``; it belongs to the checkpoint and has no default.

    Returns:
        g and u, each (..., d_ff), in that order whatever the layout.

    Raises:
        ConfigError: the layout is unknown, missing, or given with a pair.
        ShapeError: the last axis is odd or absent, a pair does not match, or a tensor is not floating.
    """
    if isinstance(x, Tensor):
        return _halves(x, layout)
    if layout is not None:
        raise ConfigError(f"layout={layout!r} with a pair (g, u): a pair is split already; leave layout out")
    if len(x) != 2:
        raise ShapeError(f"x is a tuple of {len(x)}: write a pair (g, u), or one tensor with a layout")
    g, u = x
    _check_float("g", g)
    if g.shape != u.shape or g.dtype != u.dtype or g.device != u.device:
        raise ShapeError(f"g is {_described(g)} and u {_described(u)}: they need one shape, dtype and device")
    return g, u


def _halves(x: Tensor, layout: str | None) -> tuple[Tensor, Tensor]:
    if layout is None:
        known = ", ".join(f'"{name}"' for name in LAYOUTS)
        raise ConfigError(f"one tensor holds gate and up, and layout is not given: write one of {known}, or a pair")
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}{suggest(layout, LAYOUTS)}")
    _check_float("x", x)
    width = x.shape[-1]
    if width % 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}: its last axis holds gate and up, and {width} is odd")
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x[..., : width // 2], x[..., width // 2 :]
    return (first, second) if layout == "gate_up" else (second, first)


def _check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name} is {x.dtype}: write .float(), or another of float64, float32, bfloat16, float16")
    if x.dim() == 0:
        raise ShapeError(f"{name} is a single number: write it with an axis of features, (..., d_ff)")


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
