"""The formula in plain torch: what every other implementation must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.gates import Gate


def forward(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    """Return φ(g)·ψ(u), each factor rounded once and the product once; differentiable any number of times."""
    return gate(g, u).contiguous()


def backward(gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
    """Write dh·∂h/∂g into ``dg`` and dh·∂h/∂u into ``du``, where they are wanted, by autograd of the formula."""
    # An empty graph of their own: g and u may be one tensor, or have a history.
    g, u = g.detach().requires_grad_(dg is not None), u.detach().requires_grad_(du is not None)
    with torch.enable_grad():
        h = gate(g, u)
    wanted = [(x, into) for x, into in ((g, dg), (u, du)) if into is not None]
    for (_, into), grad in zip(wanted, torch.autograd.grad(h, [x for x, _ in wanted], dh), strict=True):
        into.copy_(grad)
