"""The laws that experts in C++ are held to before they are used: what they get wrong, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorformer.ops.grouped_experts import reference
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.operands import LAYOUTS

_NAMES = ("y", "dx", "d_gate_up", "d_down", "d_weights", "d_gate_up_bias", "d_down_bias")

# Tokens, experts, how many a token goes to, d, d_ff; the spread of x; and how matrices and dy lie.
_CASES = (
    ((1, 5, 3, 33, 17), 1.0, "as they are"),
    ((7, 9, 2, 5, 3), 1.0, "transposed"),
    ((63, 4, 2, 65, 33), 1.0, "as they are"),
    ((63, 4, 2, 31, 40), 3.0, "transposed"),
    ((257, 3, 1, 16, 63), 8.0, "alike"),
    ((450, 1, 1, 9, 5), 1.0, "as they are"),
    ((0, 3, 2, 5, 4), 1.0, "as they are"),
)


class _Case(NamedTuple):
    name: str
    operands: Operands
    indices: Tensor
    activation: Activation
    dy: Tensor


def violations(kernels: Any, activation: Activation, dtype: torch.dtype) -> list[str]:
    """Run an implementation on fixed inputs and say what is wrong with it; nothing is, where the list is empty.

    Each result is compared with the reference in float64: an error may be four times the largest of the reference in
    the same dtype, and four units in the last place of the largest number. Sizes are odd, some experts have no token,
    matrices lie either way, each layout is tried, with biases and without; and what is not finite in one token must
    stay in its own row.

    Args:
        kernels: has ``groups_of``, ``forward`` and ``backward``.
        activation: between the products; its layout does not matter.
        dtype: of the operands. Before bfloat16 float32 is tried: 1 % off hides in the rounding of bfloat16.

    Returns:
        One line for each fault found; those in float32 alone if there are any.
    """
    for tried in dict.fromkeys((torch.float32, dtype)):
        found = [
            f"{str(tried).removeprefix('torch.')}, {case.name}: {fault}"
            for case in _cases(activation, tried)
            for fault in _faults(kernels, case)
        ]
        if found:
            return found
    return []


def _faults(kernels: Any, case: _Case) -> Iterator[str]:
    before = [t.clone() for t in (*case.operands.given(), case.dy)]
    try:
        found, poisoned = _run(kernels, case), _run(kernels, _poisoned(case))
    except Exception as error:
        yield f"{type(error).__name__}: {error}".splitlines()[0]
        return
    if not all(torch.equal(a, b) for a, b in zip((*case.operands.given(), case.dy), before, strict=True)):
        yield "writes into an operand"
    truth, usual = _truth(case, torch.float64), _truth(case, case.dy.dtype)
    names = [n for n, t in zip(_NAMES[1:], case.operands, strict=True) if t is not None]
    for name, a, b, exact in zip(["y", *names], found, usual, truth, strict=True):
        if a.shape != exact.shape or a.dtype != b.dtype:
            yield f"{name} is {a.dtype} of shape {tuple(a.shape)}: make it {b.dtype} of {tuple(exact.shape)}"
        elif a.numel():
            error, own, largest = (t.abs().max().item() for t in (a.double() - exact, b.double() - exact, exact))
            limit = 4 * (own + torch.finfo(a.dtype).eps * largest) + torch.finfo(a.dtype).tiny
            if not error <= limit:
                yield f"{name} is {error:.2g} off, {limit:.2g} allowed"
    if len(case.dy) > 1:
        for name, a, b in (("y", found[0], poisoned[0]), ("dx", found[1], poisoned[1])):
            if not torch.equal(a[1:], b[1:]):
                yield f"{name} of a token depends on another token"


def _run(kernels: Any, case: _Case) -> list[Tensor]:
    """Return y and the gradients, having compared y with that of a pass that keeps nothing."""
    operands, activation = case.operands, case.activation
    groups = kernels.groups_of(operands, case.indices)
    y, kept = kernels.forward(operands, groups, activation, True)
    if not torch.equal(y.nan_to_num(7.0), kernels.forward(operands, groups, activation, False)[0].nan_to_num(7.0)):
        raise ValueError("y depends on whether there will be a backward")
    found = kernels.backward(operands, groups, activation, kept, case.dy, [t is not None for t in operands])
    return [y, *(grad for grad in found if grad is not None)]


def _truth(case: _Case, dtype: torch.dtype) -> list[Tensor]:
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in case.operands]
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        y = reference.forward(Operands(*leaves), case.indices, case.activation)  # pyright: ignore[reportArgumentType]
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], case.dy.to(dtype))]


def _poisoned(case: _Case) -> _Case:
    x = case.operands.x.clone()
    x[:1] = torch.nan
    return case._replace(operands=case.operands._replace(x=x))


def _cases(activation: Activation, dtype: torch.dtype) -> Iterator[_Case]:
    draws = torch.Generator().manual_seed(5)
    layouts = list(LAYOUTS) if activation.projections == 2 else ["gate_up"]
    for i, ((tokens, experts, top_k, d, d_ff), spread, lie) in enumerate(_CASES):
        shapes = ((tokens, d), (experts, d, activation.projections * d_ff), (experts, d_ff, d), (tokens, top_k))
        biases = ((experts, activation.projections * d_ff), (experts, d))
        drawn = [
            (torch.randn(shape, generator=draws, dtype=torch.float64) * scale + 0.1 * scale).to(dtype)
            for shape, scale in zip(
                (*shapes, *biases), (spread, d**-0.5, d_ff**-0.5, 0.5, 0.3, 0.4), strict=True
            )
        ]  # fmt: skip
        dy = (torch.randn(tokens, d, generator=draws, dtype=torch.float64) * 0.7 + 0.2).to(dtype)
        # The last expert is chosen by few, or by none.
        favour = torch.rand(tokens, experts, generator=draws) ** torch.linspace(0.2, 4, experts)
        if lie == "transposed":
            drawn[1:3] = [t.mT.contiguous().mT for t in drawn[1:3]]
        if lie == "alike":
            dy = dy[:1].expand_as(dy)
        operands = Operands(*drawn[:4], *(drawn[4:] if i % 2 else (None, None)))
        layout = layouts[i % len(layouts)]
        name = f"{tokens} tokens, {experts} experts, top {top_k}, d {d}, d_ff {d_ff}, {layout}, {lie}"
        yield _Case(name, operands, favour.topk(top_k).indices, activation._replace(layout=layout), dy)
