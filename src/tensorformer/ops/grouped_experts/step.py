"""An activation on the rows of a tile, and its gradients, without a graph: inside an operator autograd is blind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from tensorformer.gates import Gate, Scalar
from tensorformer.ops.grouped_experts.activation import Activation


class _Factor(NamedTuple):
    """A function at x: y, and whether that is known to be finite throughout."""

    scalar: Scalar
    x: Tensor
    y: Tensor
    calm: bool

    def pull(self, grad: Tensor, name: str | None) -> Tensor:
        """Return grad · ∂y/∂x, or grad · ∂y by the parameter ``name``, element by element."""
        scalar = self.scalar
        if name is None and scalar._formula == "x":
            return grad
        index = 0 if name is None else 1 + scalar._names.index(name)
        found = scalar._kernel(self.x).pull(self.calm, index, grad, self.x, *scalar._given)
        return torch.zeros_like(grad) if found is None else found


@final
class Step:
    """h = φ(g)·ψ(u), or f of the one projection, on the rows of a tile.

    Args:
        activation: with parameters that fit (experts, 1, d_ff).
        pre: (rows, 2·d_ff), of a scalar (rows, d_ff); kept, not copied.
        experts: (rows,) the expert of each, where a parameter may differ between them.
    """

    def __init__(self, activation: Activation, pre: Tensor, experts: Tensor | None) -> None:
        self._activation, self._experts = activation, experts
        gate = (activation if experts is None else activation.on_rows(experts)).gate
        scalars = (gate.gate, gate.value) if isinstance(gate, Gate) else (gate,)
        with torch.no_grad():
            self._factors = [_at(s, x) for s, x in zip(scalars, activation.views(pre), strict=True)]

    def value(self) -> Tensor:
        """Return h (rows, d_ff), each factor rounded once and the product once."""
        first, *rest = self._factors
        return first.y * rest[0].y if rest else first.y

    def pull(self, dh: Tensor, d_pre: Tensor, totals: Mapping[str, Tensor]) -> None:
        """Write dh·∂h/∂pre into ``d_pre``, and add Σ dh·∂h/∂p to the total of each parameter that has one."""
        for i, (factor, into) in enumerate(zip(self._factors, self._activation.views(d_pre), strict=True)):
            grad = dh * self._factors[1 - i].y if len(self._factors) == 2 else dh
            into.copy_(factor.pull(grad, None))
            for name in totals.keys() & set(factor.scalar._names):
                self._add(factor.pull(grad, name), totals[name])

    def _add(self, grad: Tensor, total: Tensor) -> None:
        rows, grad = total.squeeze(1) if total.dim() == 3 else total, grad.to(total.dtype)
        if self._experts is None or total.dim() < 3 or len(total) == 1:
            rows += grad.sum_to_size(rows.shape)
        else:
            rows.index_add_(0, self._experts, grad.sum_to_size(len(grad), rows.shape[1]))


def _at(scalar: Scalar, x: Tensor) -> _Factor:
    if scalar._formula == "x":
        return _Factor(scalar, x, x, False)
    return _Factor(scalar, x, *scalar._kernel(x).calm_value(x, *scalar._given))
