"""The fast path and Triton's as operators of `torch.library`, for graphs: `torch.compile` takes them as they are.

Only compiled code calls them. In eager code an operator costs some 60 µs a call more than the autograd function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorformer.ops.linear_attention.function import KERNELS


@torch.library.custom_op(
    "tensorformer::linear_attention",
    mutates_args=(),
    schema="(Tensor[] q, Tensor[] k, Tensor v, Tensor? log_decay, Tensor? state, SymInt chunk, bool final, str impl)"
    " -> (Tensor, Tensor)",
)
def linear_attention_op(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    chunk: int,
    final: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return y and the final state, an empty tensor where it is not asked for."""
    y, s = KERNELS[impl].forward(tuple(q), tuple(k), v, log_decay, state, chunk, final)
    return y, v.new_empty(0) if s is None else s


@linear_attention_op.register_fake
def _(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    chunk: int,
    final: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not final:
        return y, v.new_empty(0)
    batch, _, heads, value = v.shape
    width = math.prod([x.shape[-1] for x in k])
    return y, v.new_empty(batch, heads, width, value, dtype=torch.promote_types(v.dtype, torch.float32))


@torch.library.custom_op(
    "tensorformer::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor[] q, Tensor[] k, Tensor v, Tensor? log_decay, Tensor? state, Tensor dy, Tensor? d_state,"
    " SymInt chunk, bool state_needed, bool decay_needed, str impl) -> Tensor[]",
)
def linear_attention_backward_op(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    dy: Tensor,
    d_state: Tensor | None,
    chunk: int,
    state_needed: bool,
    decay_needed: bool,
    impl: str,
) -> list[Tensor]:
    """Return the gradients of v, of log_decay and state where needed, and of the branches of q and k."""
    grads = KERNELS[impl].backward(
        tuple(q), tuple(k), v, log_decay, state, dy, d_state, chunk, state_needed, decay_needed
    )
    return [grad for grad in grads if grad is not None]


@linear_attention_backward_op.register_fake
def _(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    dy: Tensor,
    d_state: Tensor | None,
    chunk: int,
    state_needed: bool,
    decay_needed: bool,
    impl: str,
) -> list[Tensor]:
    wanted = (v, log_decay if decay_needed else None, state if state_needed else None, *q, *k)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in wanted if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, log_decay, state, ctx.chunk, ctx.final, ctx.impl = inputs
    ctx.save_for_backward(v, log_decay, state, *q, *k)


def _backward(ctx: Any, dy: Tensor, d_state: Tensor) -> tuple[Any, ...]:
    v, log_decay, state, *qk = ctx.saved_tensors
    half = len(qk) // 2
    decay_needed, state_needed = ctx.needs_input_grad[3:5]
    found = iter(
        linear_attention_backward_op(
            qk[:half],
            qk[half:],
            v,
            log_decay,
            state,
            dy,
            d_state if ctx.final else None,
            ctx.chunk,
            state_needed,
            decay_needed,
            ctx.impl,
        )
    )
    dv = next(found)
    d_log_decay = next(found) if decay_needed else None
    d_initial = next(found) if state_needed else None
    dq, dk = [next(found) for _ in range(half)], [next(found) for _ in range(half)]
    return dq, dk, dv, d_log_decay, d_initial, None, None, None


linear_attention_op.register_autograd(_backward, setup_context=_setup_context)
