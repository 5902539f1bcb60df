"""The contract of linear attention: what goes in and out, what is refused, and which implementation runs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest
from tensorformer.ops.linear_attention import plan
from tensorformer.ops.linear_attention.fast import LinearAttentionFunction
from tensorformer.ops.linear_attention.plan import Plan
from tensorformer.ops.linear_attention.reference import recurrence

Impl = Literal["auto", "reference", "fast"]
Branches = Tensor | tuple[Tensor, Tensor]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def linear_attention(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
    impl: Impl = "auto",
    *,
    final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally without a softmax, through a state of fixed size.
    """
    qs, ks = _branches(q), _branches(k)
    _check(qs, ks, v, log_decay, state)
    chosen = _plan(qs, v, state, chunk, impl, final_state)
    dtype = _common_dtype(qs, ks, v)
    wide = torch.promote_types(dtype, torch.float32)
    qs, ks = tuple(x.to(dtype) for x in qs), tuple(x.to(dtype) for x in ks)
    values, s = v.to(dtype), None if state is None else state.to(wide)
    if chosen.impl == "reference":
        with torch.autocast(v.device.type, enabled=False):
            y, s = recurrence(qs, ks, values, log_decay, s)
        return y.to(v.dtype), s if final_state else None
    y, s = LinearAttentionFunction.apply(chosen.chunk, final_state, values, log_decay, s, *qs, *ks)
    return y.to(v.dtype), s


def _branches(x: Branches) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _common_dtype(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor) -> torch.dtype:
    dtype = v.dtype
    for x in (*q, *k):
        dtype = torch.promote_types(dtype, x.dtype)
    device = v.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def _check(q, k, v, log_decay, state) -> None:
    pass


def _plan(q, v, state, chunk, impl, final) -> Plan:
    time = v.shape[1]
    if impl == "reference":
        return Plan("reference", "recurrent", 1)
    if chunk is None:
        chunk = plan.auto_chunk(time, tuple(x.shape[-1] for x in q), v.shape[-1], state is not None, final)
    return Plan("fast", plan.form(time, chunk), chunk)
