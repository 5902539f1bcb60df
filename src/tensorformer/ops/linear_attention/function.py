"""One autograd function for each implementation of the additive update: it saves its inputs and nothing else."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tensorformer.ops.linear_attention import fast, triton
from tensorformer.ops.linear_attention.derivative import differentiable_backward
from tensorformer.ops.linear_attention.reference import recurrence

Branches = tuple[Tensor, ...]


@runtime_checkable
class Kernels(Protocol):
    """What an implementation is: a module with these two."""

    def forward(
        self,
        q: Branches,
        k: Branches,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor | None,
        chunk: int,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]: ...

    def backward(
        self,
        q: Branches,
        k: Branches,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor | None,
        dy: Tensor | None,
        d_state: Tensor | None,
        chunk: int,
        state_needed: bool,
        decay_needed: bool,
    ) -> tuple[Tensor | None, ...]: ...


KERNELS: dict[str, Kernels] = {"fast": fast, "triton": triton}


class AdditiveFunction(torch.autograd.Function):
    """`apply(kernels, chunk, final, v, log_decay, state, *q, *k)` → (y, state or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        chunk: int,
        final: bool,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor | None,
        *qk: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.kernels, ctx.chunk = kernels, chunk
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, log_decay, state, *qk)
        half = len(qk) // 2
        return kernels.forward(qk[:half], qk[half:], v, log_decay, state, chunk, final)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, d_state = d_outputs
        v, log_decay, state, *qk = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if dy is None and d_state is None:
            return (None,) * (len(needed) + 3)
        half = len(qk) // 2
        if torch.is_grad_enabled():

            def call(v: Tensor, log_decay: Tensor | None, state: Tensor | None, *qk: Tensor) -> tuple[Tensor, Tensor]:
                return recurrence(qk[:half], qk[half:], v, () if log_decay is None else (log_decay,), state)

            grads = differentiable_backward(call, (v, log_decay, state, *qk), needed, (dy, d_state))
        else:
            q, k = tuple(qk[:half]), tuple(qk[half:])
            grads = ctx.kernels.backward(q, k, v, log_decay, state, dy, d_state, ctx.chunk, needed[2], needed[1])
        return (None, None, None, *grads)
