"""The reference, a tile of tokens at a time: the product is never in memory as a whole, and seldom out of cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.act_quant import reference
from tensorformer.ops.act_quant.formats import Format

TILE = 1 << 18  # numbers: one mebibyte of float32


def forward(
    gate: Gate, g: Tensor, u: Tensor, weight: Tensor | None, spec: Format, group: int, tensor_scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the reference returns; besides, only temporaries of one tile, or of one token where that is more."""
    *leading, width = g.shape
    tiles = list(_tiles(tuple(leading), width))
    if len(tiles) == 1:
        return reference.forward(gate, g, u, weight, spec, group, tensor_scale)
    codes = torch.empty(*leading, spec.code_width(width), dtype=spec.codes, device=g.device)
    scale = torch.empty(*leading, -(-width // group), dtype=spec.scale, device=g.device)
    per_token = {n: p.expand(g.shape) for n, p in gate.parameters.items() if isinstance(p, Tensor) and p.dim() > 1}
    for tile in tiles:
        part = gate.bind(**{n: p[tile] for n, p in per_token.items()}) if per_token else gate
        w = None if weight is None else weight[tile]
        codes[tile], scale[tile] = reference.forward(part, g[tile], u[tile], w, spec, group, tensor_scale)
    return codes, scale


def _tiles(leading: tuple[int, ...], width: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the leading axes that cover them once, each of at most ``TILE`` numbers or one token."""
    if not leading or math.prod(leading) * width <= TILE:
        yield ()
        return
    fit = TILE // max(math.prod(leading[1:]) * width, 1)
    # A power of two: torch's vector loops then end where a tile does, and round as they would on the whole.
    step = 1 << max(fit.bit_length() - 1, 0)
    for i in range(0, leading[0], step):
        inner = _tiles(leading[1:], width) if fit == 0 else [()]
        for rest in inner:
            yield (slice(i, i + step), *rest)
