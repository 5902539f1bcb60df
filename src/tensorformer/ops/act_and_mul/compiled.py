"""`native` and `triton` as operators of `torch.library`, for graphs: `torch.compile` takes them as they are.

Only compiled code calls them. In eager code an operator costs some 60 µs a call more than the autograd function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.ops.act_and_mul.function import gate_and_up, gradients, required


def act_and_mul_in_graph(operands: Sequence[Tensor], gate: Gate, layout: str | None, impl: str) -> Tensor:
    """Call the operator: a graph holds a gate as its name in the catalogue and the numbers bound to it.

    Raises:
        ConfigError: the gate is not one of the catalogue, or has a tensor as a parameter.
    """
    if not _is_known(gate.name, gate.gate.formula, gate.value.formula):
        raise ConfigError(
            f"impl {impl!r} under torch.compile takes gates of the catalogue, and {gate.name!r} is not one:"
            ' write impl="auto", or add it by an entry point of the group "tensorformer.gates"'
        )
    names, values = [], []
    for name, value in gate.parameters.items():
        if isinstance(value, Tensor):
            raise ConfigError(
                f"impl {impl!r} under torch.compile takes numbers, and {name} of {gate.name!r} is a tensor:"
                ' write impl="auto"'
            )
        if value is not None:
            names.append(name)
            values.append(value)
    return act_and_mul_op(operands, layout, impl, gate.name, names, values)


def _is_known(name: str, phi: str, psi: str) -> bool:
    return name in GATES and (GATES[name].gate.formula, GATES[name].value.formula) == (phi, psi)


# As in gates/kernel.py: asked once while tracing, since the catalogue may still have to read its entry points.
_is_known._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(maxsize=256)
def _gate(name: str, names: tuple[str, ...], values: tuple[float, ...]) -> Gate:
    gate = GATES[name]
    return gate.bind(**{**dict.fromkeys(gate.needs), **dict(zip(names, values, strict=True))})


@torch.library.custom_op(
    "tensorformer::act_and_mul",
    mutates_args=(),
    schema="(Tensor[] operands, str? layout, str impl, str gate, str[] names, float[] values) -> Tensor",
)
def act_and_mul_op(
    operands: Sequence[Tensor], layout: str | None, impl: str, gate: str, names: Sequence[str], values: Sequence[float]
) -> Tensor:
    """Return φ(g)·ψ(u) of one tensor and a layout, or of a pair."""
    g, u = gate_and_up(tuple(operands), layout)
    bound = _gate(gate, tuple(names), tuple(values))
    return required(impl, bound, g).forward(bound, g, u)


@act_and_mul_op.register_fake
def _(
    operands: Sequence[Tensor], layout: str | None, impl: str, gate: str, names: Sequence[str], values: Sequence[float]
) -> Tensor:
    g, _ = gate_and_up(tuple(operands), layout)
    return torch.empty(g.shape, dtype=g.dtype, device=g.device)


@torch.library.custom_op(
    "tensorformer::act_and_mul_backward",
    mutates_args=(),
    schema="(Tensor dh, Tensor[] operands, str? layout, str impl, str gate, str[] names, float[] values) -> Tensor[]",
)
def act_and_mul_backward_op(
    dh: Tensor,
    operands: Sequence[Tensor],
    layout: str | None,
    impl: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
) -> list[Tensor]:
    """Return the gradient of each operand."""
    g, _ = gate_and_up(tuple(operands), layout)
    bound = _gate(gate, tuple(names), tuple(values))
    found = gradients(required(impl, bound, g), bound, layout, tuple(operands), dh, (True,) * len(operands))
    return [grad for grad in found if grad is not None]


@act_and_mul_backward_op.register_fake
def _(
    dh: Tensor,
    operands: Sequence[Tensor],
    layout: str | None,
    impl: str,
    gate: str,
    names: Sequence[str],
    values: Sequence[float],
) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in operands]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, *ctx.others = inputs
    ctx.save_for_backward(*operands)


def _backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
    grads = act_and_mul_backward_op(dh, list(ctx.saved_tensors), *ctx.others)
    # torch wants a None for a list of numbers, and a list for an empty one.
    nothing = None if ctx.others[-1] else []
    return grads, None, None, None, nothing, nothing


act_and_mul_op.register_autograd(_backward, setup_context=_setup_context)
