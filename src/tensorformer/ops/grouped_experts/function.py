"""The autograd function of grouped experts: it keeps its operands and the projections, and computes the rest again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tensorformer.gates.kernel import is_batch
from tensorformer.ops.grouped_experts import fast, native, reference, triton
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands


@runtime_checkable
class Kernels(Protocol):
    """What an implementation is: a module with these three, of which the first says what the others take as groups."""

    def groups_of(self, operands: Operands, indices: Tensor) -> Any: ...

    def forward(
        self, operands: Operands, groups: Any, activation: Activation, keep: bool
    ) -> tuple[Tensor, Tensor | None]: ...

    def backward(
        self, operands: Operands, groups: Any, activation: Activation, kept: Tensor, dy: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]: ...


KERNELS: dict[str, Kernels] = {"fast": fast, "native": native, "triton": triton}


class GroupedExperts(torch.autograd.Function):
    """An implementation, the activation and the routing; six operands, None for a bias that isn't there; then the
    parameters of the activation that are tensors."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, kernels: Kernels, activation: Activation, indices: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        operands = Operands(*tensors[:6])  # pyright: ignore[reportArgumentType]
        ctx.kernels, ctx.activation = kernels, activation
        ctx.groups = kernels.groups_of(operands, indices)
        y, kept = kernels.forward(operands, ctx.groups, activation, keep=True)
        ctx.save_for_backward(indices, kept, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        indices, kept, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled() or is_batch(dy):
            again = torch.is_grad_enabled()
            return (None, None, None, *gradients(ctx.activation, indices, tensors, dy, needed, again))
        activation = ctx.activation.with_tensors(tuple(tensors[6:]))
        found = ctx.kernels.backward(Operands(*tensors[:6]), ctx.groups, activation, kept, dy, needed)
        return (None, None, None, *found)


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
