"""Where each token stands in its own document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tensorformer.errors import ShapeError
from tensorformer.ops.linear_attention.segments import first_steps


class Places(NamedTuple):
    """Positions and documents of the tokens of a call.

    Attributes:
        position: counted from 0 within each document; the first document of a row goes on from what the row has seen.
        document: 0 for the first of a row, 1 for the next, …; −1 is padding. None: no row has a second, or padding.
    """

    position: Int[Tensor, "*b t"]
    document: Int[Tensor, "b t"] | None

    def after(self, seen: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Return the tokens that each row has seen of its last document, given those before the call."""
        if self.document is None:
            return seen + self.position.shape[-1]
        real = self.document >= 0
        steps = torch.arange(1, real.shape[1] + 1, device=seen.device)
        last = (real * steps).amax(1, keepdim=True) if real.shape[1] else seen.new_zeros(real.shape[0], 1)
        at_last = self.position.gather(1, (last - 1).clamp_min(0)) if real.shape[1] else last
        return torch.where(last > 0, at_last + 1, seen.unsqueeze(1)).squeeze(1)


def places(
    shape: Sequence[int], device: torch.device, seen: Int[Tensor, " b"] | None, segments: Int[Tensor, "b t"] | None
) -> Places:
    """Return where tokens stand.

    Args:
        shape: rows, and tokens a row.
        device: of the result.
        seen: tokens of each row before this call; None: none.
        segments: as ``linear_attention`` takes them: −1 is padding, a new number starts a new document.

    Raises:
        ShapeError: segments are not one integer a token.
    """
    time = shape[1]
    steps = torch.arange(time, device=device)
    if segments is None:
        return Places(steps if seen is None else seen.unsqueeze(1) + steps, None)
    if segments.shape != shape or segments.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"segments are {segments.dtype} {list(segments.shape)}: write one integer a token, {list(shape)}, "
            f"-1 for padding and a new number for each document"
        )
    real, fresh = segments >= 0, first_steps(segments)
    index = real.long().cumsum(1) - 1
    document = fresh.long().cumsum(1)
    start = torch.where(fresh, index, 0).cummax(1).values if time else index
    before = 0 if seen is None else torch.where(document == 0, seen.unsqueeze(1), 0)
    return Places((index - start + before).clamp_min(0), document.masked_fill(~real, -1))
