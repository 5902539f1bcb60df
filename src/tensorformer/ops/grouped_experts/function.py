"""The autograd function of grouped experts: it keeps its operands and the projections, and computes the rest again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorformer.gates.kernel import is_batch
from tensorformer.ops.grouped_experts import fast, reference
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.fast import groups_of


class GroupedExperts(torch.autograd.Function):
    """Six operands, None for a bias that isn't there, then the parameters of the activation that are tensors."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, indices: Tensor, *tensors: Tensor | None) -> Tensor:  # pyright: ignore
        operands = Operands(*tensors[:6])  # pyright: ignore[reportArgumentType]
        ctx.groups = groups_of(operands, indices)
        ctx.activation = activation
        y, kept = fast.forward(operands, ctx.groups, activation, keep=True)
        ctx.save_for_backward(indices, kept, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        indices, kept, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or is_batch(dy):
            return (None, None, *gradients(ctx.activation, indices, tensors, dy, needed, again=torch.is_grad_enabled()))
        activation = ctx.activation.with_tensors(tuple(tensors[6:]))
        return (None, None, *fast.backward(Operands(*tensors[:6]), ctx.groups, activation, kept, dy, needed))


def gradients(
    activation: Activation,
    indices: Tensor,
    tensors: list[Tensor | None],
    dy: Tensor,
    needed: tuple[bool, ...],
    again: bool,
) -> list[Tensor | None]:
    """Return the gradients through the reference: as functions of the operands and of ``dy``, where ``again``."""
    with torch.enable_grad(), torch.autocast(dy.device.type, enabled=False):
        # Views tell apart operands that are one tensor: each gets its own share.
        if again:
            leaves = [None if t is None else t.view_as(t) for t in tensors]
        else:
            leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        parameters = tuple(t for t in leaves[6:] if t is not None)
        y = reference.forward(Operands(*leaves[:6]), indices, activation.with_tensors(parameters))  # pyright: ignore
    wanted = [t for t, n in zip(leaves, needed, strict=True) if n and t is not None]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again, materialize_grads=not again, allow_unused=True))
    return [next(found) if n else None for n in needed]
