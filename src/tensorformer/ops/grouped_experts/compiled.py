"""Grouped experts as operators of `torch.library`, for graphs: `torch.compile` takes them as they are.

How many rows an expert has is data, so what runs inside can't be traced. Only compiled code and fake tensors call
these. In eager code an operator costs some 60 µs a call more than the autograd function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, SCALARS
from tensorformer.ops.grouped_experts import fast
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.function import KERNELS

_OPERANDS = "Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor? gate_up_bias, Tensor? down_bias"
_ACTIVATION = "str layout, str gate, str[] names, float[] values, str[] learned, Tensor[] parameters"


def grouped_experts_in_graph(operands: Operands, indices: Tensor, activation: Activation, impl: str) -> Tensor:
    """Call the operator: a graph holds an activation as its name in the catalogue and what is bound to it.

    Raises:
        ConfigError: the activation is not one of the catalogue.
    """
    gate = activation.gate
    if not _is_known(activation.kind, gate.name, activation.formulas):
        raise ConfigError(
            f"grouped_experts under torch.compile takes gates of the catalogue, and {gate.name!r} is not one:"
            ' add it by an entry point of the group "tensorformer.gates"'
        )
    numbers = {n: v for n, v in gate.parameters.items() if v is not None and not isinstance(v, Tensor)}
    learned = activation.tensors
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (*operands.given(), *learned.values()))
    bound = (activation.layout, gate.name, list(numbers), list(numbers.values()), list(learned), list(learned.values()))
    return grouped_experts_op(*operands, indices, *bound, keep, impl)[0]


def _is_known(kind: str, name: str, formulas: tuple[str, ...]) -> bool:
    catalogue = GATES if kind == "gate" else SCALARS
    return name in catalogue and Activation(catalogue[name], "gate_up").formulas == formulas


# As in gates/kernel.py: asked once while tracing, since the catalogue may still have to read its entry points.
_is_known._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _activation(
    layout: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
    learned: Sequence[str],
    parameters: Sequence[Tensor],
) -> Activation:
    if learned:
        found = GATES[gate] if gate in GATES else SCALARS[gate]
        given = dict(zip((*names, *learned), (*values, *parameters), strict=True))
        return Activation(found.bind(**{**dict.fromkeys(found.needs), **given}), layout)
    return _of_numbers(layout, gate, tuple(names), tuple(values))


@functools.lru_cache(maxsize=256)
def _of_numbers(layout: str, gate: str, names: tuple[str, ...], values: tuple[float, ...]) -> Activation:
    found = GATES[gate] if gate in GATES else SCALARS[gate]
    return Activation(found.bind(**{**dict.fromkeys(found.needs), **dict(zip(names, values, strict=True))}), layout)


@torch.library.custom_op(
    "tensorformer::grouped_experts",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor indices, {_ACTIVATION}, bool keep, str impl) -> (Tensor, Tensor)",
)
def grouped_experts_op(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    indices: Tensor,
    layout: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
    learned: Sequence[str],
    parameters: Sequence[Tensor],
    keep: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return y and the projections sorted by expert, an empty tensor where they are not to be kept."""
    operands = Operands(x, gate_up, down, weights, gate_up_bias, down_bias)
    activation = _activation(layout, gate, names, values, learned, parameters)
    kernels = KERNELS[impl]
    y, kept = kernels.forward(operands, kernels.groups_of(operands, indices), activation, keep)
    return y, x.new_empty(0) if kept is None else kept


@grouped_experts_op.register_fake
def _(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    indices: Tensor,
    layout: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
    learned: Sequence[str],
    parameters: Sequence[Tensor],
    keep: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    rows = indices.shape[0] * indices.shape[1]
    return x.new_empty(x.shape), x.new_empty(rows, gate_up.shape[2]) if keep else x.new_empty(0)


@torch.library.custom_op(
    "tensorformer::grouped_experts_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor kept, {_OPERANDS}, Tensor indices, {_ACTIVATION}, bool[] needed, str impl) -> Tensor[]",
)
def grouped_experts_backward_op(
    dy: Tensor,
    kept: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    indices: Tensor,
    layout: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
    learned: Sequence[str],
    parameters: Sequence[Tensor],
    needed: Sequence[bool],
    impl: str,
) -> list[Tensor]:
    """Return the gradients that are needed, of operands and then of parameters."""
    operands = Operands(x, gate_up, down, weights, gate_up_bias, down_bias)
    activation = _activation(layout, gate, names, values, learned, parameters)
    kernels = KERNELS[impl]
    found = kernels.backward(operands, kernels.groups_of(operands, indices), activation, kept, dy, needed)
    return [grad for grad in found if grad is not None]


@grouped_experts_backward_op.register_fake
def _(
    dy: Tensor,
    kept: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    indices: Tensor,
    layout: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
    learned: Sequence[str],
    parameters: Sequence[Tensor],
    needed: Sequence[bool],
    impl: str,
) -> list[Tensor]:
    tensors = (x, gate_up, down, weights, gate_up_bias, down_bias, *parameters)
    return [fast.place(t) for t, n in zip(tensors, needed, strict=True) if n and t is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, indices, ctx.layout, ctx.gate, ctx.names, ctx.values, ctx.learned, parameters, _, ctx.impl = inputs
    ctx.save_for_backward(output[1], indices, *operands, *parameters)


def _backward(ctx: Any, dy: Tensor, d_kept: Tensor) -> tuple[Any, ...]:
    kept, indices, *tensors = ctx.saved_tensors
    operands, parameters = tensors[:6], tensors[6:]
    given = [n and t is not None for n, t in zip(ctx.needs_input_grad[:6], operands, strict=True)]
    needed = [*given, *(True for _ in parameters)]
    bound = (ctx.layout, ctx.gate, ctx.names, ctx.values, ctx.learned, parameters)
    found = iter(grouped_experts_backward_op(dy, kept, *operands, indices, *bound, needed, ctx.impl))
    grads = [next(found) if n else None for n in needed]
    # torch wants a None for a list of numbers, and a list for an empty one.
    lists = [None if given else [] for given in (ctx.names, ctx.values, ctx.learned)]
    return (*grads[:6], None, None, None, *lists, grads[6:], None, None)


grouped_experts_op.register_autograd(_backward, setup_context=_setup_context)
