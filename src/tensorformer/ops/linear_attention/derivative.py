"""Derivatives of derivatives: the gradient as a function that autograd follows, through the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_backward(
    call: Callable[..., tuple[Tensor, Tensor]],
    operands: Sequence[Tensor | None],
    needed: Sequence[bool],
    d_outputs: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands of `call` as functions of them and of `d_outputs`.

    Second derivatives are for study and tests at small sizes: they cost what the reference costs.
    """
    # Views tell apart operands that are one tensor (q and k tied, say): each gets its own share.
    views = [None if x is None else x.view_as(x) for x in operands]
    wanted = [x for x, need in zip(views, needed, strict=True) if need and x is not None]
    device = next(x.device.type for x in operands if x is not None)
    with torch.autocast(device, enabled=False):
        outputs = call(*views)
        pairs = [(o, d) for o, d in zip(outputs, d_outputs, strict=True) if d is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs], wanted, [d for _, d in pairs], create_graph=True, allow_unused=True
        )
    remaining = iter(found)
    return tuple(next(remaining) if need else None for need in needed)
