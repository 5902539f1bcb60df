"""Cases of routed experts, and the comparison that every implementation of them, right or broken, goes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorformer.gates import Gate, Scalar
from tensorformer.ops.grouped_experts import grouped_experts
from tests.ops.interpreted import assert_within_budget

NAMES = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class Case:
    """Operands in the order of NAMES, of which biases may be None; the routing, the activation, and dy."""

    operands: tuple[Tensor | None, ...]
    indices: Tensor
    gate: Gate | Scalar | str
    layout: str
    dy: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        operands = tuple(None if t is None else t.to(dtype) for t in self.operands)
        return Case(operands, self.indices, self.gate, self.layout, self.dy.to(dtype))


Run = Callable[[Case], list[Tensor]]


def draw(
    tokens: int,
    experts: int,
    top_k: int,
    d: int,
    d_ff: int,
    gate: Gate | Scalar | str = "swiglu",
    *,
    layout: str = "gate_up",
    biases: bool = True,
    halves: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Draw a case of unlike spreads, whose experts get unlike numbers of tokens, some of them none."""
    draws = torch.Generator().manual_seed(seed)
    shapes = [(tokens, d), (experts, d, halves * d_ff), (experts, d_ff, d), (tokens, top_k)]
    shapes += [(experts, halves * d_ff), (experts, d)]
    spreads = (1.0, 2.0 / d**0.5, 0.7 / max(1, d_ff) ** 0.5, 0.5, 0.3, 0.4)
    drawn = [
        (torch.randn(s, generator=draws, dtype=torch.float64) + 0.1) * spread
        for s, spread in zip(shapes, spreads, strict=True)
    ]
    operands = tuple(t if biases or i < 4 else None for i, t in enumerate(drawn))
    favour = torch.rand(tokens, experts, generator=draws) ** torch.linspace(0.2, 3, experts)
    indices = favour.topk(top_k).indices
    dy = torch.randn(tokens, d, generator=draws, dtype=torch.float64) * 0.7 + 0.2
    return Case(operands, indices, gate, layout, dy).to(dtype)


def call(leaves: Sequence[Tensor | None], case: Case, impl: str = "fast") -> Tensor:
    """Return y of these operands, with the routing and the activation of ``case``."""
    x, gate_up, down, weights, *biases = leaves
    assert x is not None
    assert gate_up is not None
    assert down is not None
    assert weights is not None
    return grouped_experts(
        x, gate_up, down, case.gate, case.indices, weights, *biases[:2], layout=case.layout, impl=impl
    )


def run(case: Case, impl: str) -> list[Tensor]:
    """Return y and the gradient of every operand that is there."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in case.operands]
    y = call(leaves, case, impl)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], case.dy)]


def assert_each_alone(case: Case, impl: str, wanted: int) -> None:
    """Fail unless the gradient of one operand is the same, bit for bit, when it is the only one that is wanted."""
    together = run(case, impl)[1 + wanted]
    leaves = [t.requires_grad_(i == wanted) for i, t in enumerate(case.operands) if t is not None]
    call(leaves, case, impl).backward(case.dy)
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (i != wanted)
        assert leaf.grad is None or torch.equal(leaf.grad, together)


def assert_laws(implementation: Run, case: Case) -> None:
    """Compare y and all gradients with the reference in float64: to 1e-12 there, else within twice its own error."""
    before = [None if t is None else t.clone() for t in case.operands]
    found = implementation(case)
    for t, copy in zip(case.operands, before, strict=True):
        assert t is None or copy is None or torch.equal(t, copy), "writes into an operand"
    truth = run(case.to(torch.float64), "reference")
    usual = run(case, "reference")
    names = ["y", *(f"d{n}" for n, t in zip(NAMES, case.operands, strict=True) if t is not None)]
    for name, a, b, exact in zip(names, found, usual, truth, strict=True):
        assert a.shape == exact.shape, f"{name} has shape {tuple(a.shape)}"
        if a.numel() == 0:
            continue
        if a.dtype == torch.float64:
            error, largest = (a - exact).abs().max(), exact.abs().max()
            assert error <= 1e-12 * (1 + largest), f"{name}: off by {error:.3g}"
        else:
            assert_within_budget(a, b, exact, name)
