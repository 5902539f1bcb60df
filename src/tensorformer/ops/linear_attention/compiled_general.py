"""The delta rule and a decay a channel as operators of `torch.library`, for graphs; see `compiled`.

Operands come as one list, in the order of `Inputs.all`; `degree`, `decays` and `delta` say what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorformer.ops.linear_attention import general
from tensorformer.ops.linear_attention.general import Form


@torch.library.custom_op(
    "tensorformer::linear_attention_spans",
    mutates_args=(),
    schema="(Tensor[] operands, Tensor? state, int degree, int decays, bool delta, SymInt chunk, bool final, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
)
def general_op(
    operands: Sequence[Tensor],
    state: Tensor | None,
    degree: int,
    decays: int,
    delta: bool,
    chunk: int,
    final: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the final state, and the states for backward; an empty tensor for what is not asked for."""
    y, s, kept = general.forward(Form(degree, decays, delta).inputs(operands), state, chunk, final, keep)
    return y, y.new_empty(0) if s is None else s, y.new_empty(0) if kept is None else kept


@general_op.register_fake
def _(
    operands: Sequence[Tensor],
    state: Tensor | None,
    degree: int,
    decays: int,
    delta: bool,
    chunk: int,
    final: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = Form(degree, decays, delta).inputs(operands)
    y = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    s = y.new_empty(x.state_shape, dtype=x.wide) if final else y.new_empty(0)
    return y, s, y.new_empty(x.kept_shape(chunk), dtype=x.wide) if keep else y.new_empty(0)


@torch.library.custom_op(
    "tensorformer::linear_attention_spans_backward",
    mutates_args=(),
    schema="(Tensor[] operands, Tensor kept, Tensor dy, Tensor? d_state, int degree, int decays, bool delta,"
    " SymInt chunk) -> Tensor[]",
)
def general_backward_op(
    operands: Sequence[Tensor],
    kept: Tensor,
    dy: Tensor,
    d_state: Tensor | None,
    degree: int,
    decays: int,
    delta: bool,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of the initial state and of every operand."""
    grads, d_initial = general.backward(Form(degree, decays, delta).inputs(operands), kept, dy, d_state, chunk)
    return [d_initial, *grads.all()]


@general_backward_op.register_fake
def _(
    operands: Sequence[Tensor],
    kept: Tensor,
    dy: Tensor,
    d_state: Tensor | None,
    degree: int,
    decays: int,
    delta: bool,
    chunk: int,
) -> list[Tensor]:
    x = Form(degree, decays, delta).inputs(operands)
    return [x.v.new_empty(x.state_shape, dtype=x.wide), *x.empty().all()]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    operands, state, *ctx.form, ctx.chunk, ctx.final, _keep = inputs
    ctx.given = state is not None
    ctx.save_for_backward(output[2], *operands)


def _backward(ctx: Any, dy: Tensor, d_state: Tensor, _d_kept: Tensor) -> tuple[Any, ...]:
    kept, *operands = ctx.saved_tensors
    found = general_backward_op(operands, kept, dy, d_state if ctx.final else None, *ctx.form, ctx.chunk)
    return found[1:], found[0] if ctx.given else None, None, None, None, None, None, None


general_op.register_autograd(_backward, setup_context=_setup_context)
