"""One autograd function for every implementation: it saves its input and nothing else, and computes again."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import Gate
from tensorformer.gates.kernel import is_batch
from tensorformer.ops.act_and_mul import fast, reference
from tensorformer.ops.operands import halves, tensor_parameters


@runtime_checkable
class Kernels(Protocol):
    """What an implementation is: a module with these two, on views of any strides."""

    def forward(self, gate: Gate, g: Tensor, u: Tensor) -> Tensor: ...

    def backward(self, gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None: ...


class ActAndMul(torch.autograd.Function):
    """φ(g)·ψ(u) of one tensor and a layout, or of a pair; then the parameters of the gate that are tensors."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate: Gate, layout: str | None, *tensors: Tensor) -> Tensor:  # pyright: ignore
        ctx.kernels, ctx.gate, ctx.layout = kernels, gate, layout
        ctx.save_for_backward(*tensors)
        return kernels.forward(gate, *gate_and_up(tensors, layout))

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return (None, None, None, *_again(ctx.gate, ctx.layout, tensors, dh, needed))
        if is_batch(dh):  # through the formula, which torch maps
            with torch.enable_grad():
                leaves = tuple(x.detach().requires_grad_(n) for x, n in zip(tensors, needed, strict=True))
                return (None, None, None, *_again(ctx.gate, ctx.layout, leaves, dh, needed, again=False))
        count = 1 if ctx.layout else 2
        gate = with_tensors(ctx.gate, tensors[count:])
        grads = gradients(ctx.kernels, gate, ctx.layout, tensors[:count], dh, needed)
        if any(needed[count:]):
            grads += _of_parameters(gate, *gate_and_up(tensors, ctx.layout), dh, needed[count:])
        else:
            grads += [None] * len(needed[count:])
        return (None, None, None, *grads)


def gate_and_up(tensors: tuple[Tensor, ...], layout: str | None) -> tuple[Tensor, Tensor]:
    """Return g and u of a tensor with a layout or of a pair, whatever comes after."""
    return halves(tensors[0], layout) if layout else (tensors[0], tensors[1])


def gradients(
    kernels: Kernels,
    gate: Gate,
    layout: str | None,
    operands: tuple[Tensor, ...],
    dh: Tensor,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradient of the one operand or of each of the two, None where it is not needed."""
    found = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if n else None
        for x, n in zip(operands, needed, strict=False)
    ]
    g, u = gate_and_up(operands, layout)
    if layout is None:
        dg, du = found
    elif found[0] is None:
        dg, du = None, None
    else:
        dg, du = halves(found[0], layout)
    if dg is not None or du is not None:
        kernels.backward(gate, g, u, dh, dg, du)
    return found


def with_tensors(gate: Gate, values: tuple[Tensor, ...]) -> Gate:
    """Return the gate with these tensors for the parameters that are tensors, in order."""
    return gate.bind(**dict(zip(tensor_parameters(gate), values, strict=True))) if values else gate


def _of_parameters(gate: Gate, g: Tensor, u: Tensor, dh: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """Return Σ dh·∂h/∂p of each parameter that needs it, tile by tile in float32 or better."""
    wide = torch.promote_types(g.dtype, torch.float32)
    originals = tensor_parameters(gate)
    values = fast.parameters(gate, wide, g.dim())
    sums = [torch.zeros_like(v) for v in values]
    for tile in fast.tiles(fast.size(g), (g, u, dh, *values, *sums)):
        operands = [x.to(wide) for x in tile[:3]]
        leaves = [v.detach().requires_grad_(n) for v, n in zip(tile[3:], needed, strict=False)]
        wanted = [v for v, n in zip(leaves, needed, strict=True) if n]
        with torch.enable_grad():
            h = with_tensors(gate, tuple(leaves))(*operands[:2])
        found = iter(torch.autograd.grad(h, wanted, operands[2], allow_unused=True))
        for total, n in zip(tile[3 + len(values) :], needed, strict=True):
            grad = next(found) if n else None
            if grad is not None:
                total += grad
    return [
        s.reshape(v.shape).to(v.dtype) if n else None for s, v, n in zip(sums, originals.values(), needed, strict=True)
    ]


def _again(
    gate: Gate,
    layout: str | None,
    tensors: tuple[Tensor, ...],
    dh: Tensor,
    needed: tuple[bool, ...],
    again: bool = True,
) -> list[Tensor | None]:
    """Return the gradients through the formula: as functions of operands and parameters, where ``again``."""
    # Views tell apart operands that are one tensor: each gets its own share.
    tensors = tuple(x.view_as(x) for x in tensors)
    h = reference.forward(with_tensors(gate, tensors[1 if layout else 2 :]), *gate_and_up(tensors, layout))
    wanted = [x for x, n in zip(tensors, needed, strict=True) if n]
    found = iter(torch.autograd.grad(h, wanted, dh, create_graph=again, allow_unused=True))
    return [next(found) if n else None for n in needed]


def load(impl: str) -> Any:
    """Return the module of an implementation. Neither "native" nor "triton" is loaded before it is asked for."""
    return fast if impl == "fast" else importlib.import_module(f"tensorformer.ops.act_and_mul.{impl}")


def required(impl: str, gate: Gate, like: Tensor) -> Kernels:
    """Return an implementation, ready for operands like this one; "native" is built if need be.

    Raises:
        ConfigError: it can't run here.
    """
    module = load(impl)
    if impl == "fast" or (impl == "native" and like.device.type == "cpu" and module.is_ready(gate, like.dtype)):
        return module
    reason = module.why_not(gate, like.dtype, like.device)
    if reason is not None:
        raise ConfigError(f'impl "{impl}" can\'t run {gate!r} here: it {reason}')
    if impl == "native":
        module.prepare(gate, like.dtype)
    return module
