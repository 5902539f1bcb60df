"""Packed documents and padding, written into the operands: a reset is a decay of nothing, padding a step of zeros."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


class Masked(NamedTuple):
    """Operands that need no segments any more."""

    q: tuple[Float[Tensor, "b t _ _"], ...]
    k: tuple[Float[Tensor, "b t _ _"], ...]
    v: Float[Tensor, "b t h v"]
    log_decay: tuple[Float[Tensor, "b t h *_"], ...]
    beta: Float[Tensor, "b t h"] | None


def segments_from_cu_seqlens(cu_seqlens: Int[Tensor, " n"], time: int) -> Int[Tensor, "1 time"]:
    """Return the `segments` of one row that holds documents end to end, numbered from 0.

    Args:
        cu_seqlens: (documents + 1,) the step at which each begins, and the one after the last; any int dtype.
            An empty document is allowed.
        time: steps in the row; those outside of the documents are padding.

    Returns:
        (1, time), int64, −1 where a step belongs to none.
    """
    steps = torch.arange(time, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens.long().contiguous(), steps, right=True) - 1
    return document.masked_fill(document == cu_seqlens.shape[0] - 1, -1).unsqueeze(0)


def first_steps(segments: Int[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
    """Return where a document begins that is not the first of its row, whatever padding lies between the two."""
    if segments.shape[1] == 0:
        return segments.bool()
    steps = torch.arange(segments.shape[1], device=segments.device)
    latest = torch.where(segments < 0, -1, steps).cummax(1).values
    before = pad(latest[:, :-1], (1, 0), value=-1)
    return (segments >= 0) & (before >= 0) & (segments != segments.gather(1, before.clamp_min(0)))


def masked(
    q: tuple[Float[Tensor, "b t _ _"], ...],
    k: tuple[Float[Tensor, "b t _ _"], ...],
    v: Float[Tensor, "b t h v"],
    log_decay: tuple[Float[Tensor, "b t h *_"], ...],
    beta: Float[Tensor, "b t h"] | None,
    segments: Int[Tensor, "b t"],
) -> Masked:
    """Return operands whose outputs and states are those of `segments`.

    Everything of a padding step is filled, not multiplied, with zeros: not even NaN there reaches another step.
    """
    padding, fresh = segments < 0, first_steps(segments)

    def fill(x: Tensor, where: Tensor, value: float) -> Tensor:
        return x.masked_fill(where.view(*where.shape, *(1,) * (x.ndim - 2)), value)

    def kept(branches: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(fill(x, padding, 0) for x in branches)

    wide = torch.promote_types(v.dtype, torch.float32)
    first, *others = kept(log_decay) or (torch.zeros(v.shape[:3], dtype=wide, device=v.device),)
    # Branches multiply: a reset in one of them resets all.
    decays = (fill(first, fresh, -torch.inf), *others)
    return Masked(kept(q), kept(k), fill(v, padding, 0), decays, None if beta is None else fill(beta, padding, 0))
