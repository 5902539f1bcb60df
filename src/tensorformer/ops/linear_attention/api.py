"""The contract of linear attention: what goes in and out, what is refused, and what runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest
from tensorformer.ops.autocast import autocast_dtype
from tensorformer.ops.linear_attention.compiled import linear_attention_op
from tensorformer.ops.linear_attention.fast import LinearAttentionFunction, forward
from tensorformer.ops.linear_attention.plan import Plan, auto_chunk, form
from tensorformer.ops.linear_attention.reference import recurrence

Branches = Tensor | tuple[Tensor, Tensor]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def linear_attention(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
    impl: str = "auto",
    *,
    final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally through a state of fixed size, with keys of degree one or two.

    S_t = exp(log_decay_t) S_{t−1} + φ(k_t) v_tᵀ and y_t = φ(q_t)ᵀ S_t, where φ(x) = x for one branch and
    φ(x) = x₁ ⊗ x₂ for two (row-major: feature i·K₂ + j is x₁ᵢ x₂ⱼ), so that two branches score a pair of steps
    by (q₁·k₁)(q₂·k₂). Nothing is scaled or normalised. Sums and the state are kept in float32 or better.

    Under autocast q, k and v are taken in its dtype (float64 stays), otherwise in their common one.
    The fast path saves its operands for backward and nothing else. A second derivative is right too, and
    costs what the reference costs; inside `torch.compile` it raises.

    Args:
        q, k: one tensor (B, T, H, K₁), or a pair of (B, T, H, K_r), of any float dtype and strides.
        v: (B, T, H, V).
        log_decay: (B, T, H), natural logarithm of the decay of each step, meant to be ≤ 0 (never checked);
            −inf forgets all that came before. Its gradient there is zero.
        state: (B, H, K, V) with K = ∏ K_r, the state before the first step; zero where not given.
        chunk: steps a chunk. 1 is the recurrence, T or more the quadratic form; by default the cheapest.
        impl: "auto", "fast", or "reference" (step by step, differentiable any number of times).
        final_state: whether to work out the state after the last step. Training rarely needs it, and at short
            T it costs more than all the rest.

    Returns:
        y (B, T, H, V) in v's dtype, and the state (B, H, K, V) in float32 or better, or None if not asked for.

    Raises:
        ShapeError: shapes or dtypes do not fit together.
        ConfigError: there is no such `impl`, or it has no such `chunk`.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236); in chunks: Yang et al. 2024 (arXiv 2312.06635).
    """
    queries, keys = _branches(q), _branches(k)
    _check(queries, keys, v, log_decay, state)
    plan = _plan(keys, v, state, chunk, impl, final_state)
    dtype = _common_dtype(queries, keys, v)
    if any(x.dtype != dtype for x in (*queries, *keys, v)):
        queries, keys = tuple(x.to(dtype) for x in queries), tuple(x.to(dtype) for x in keys)
    values, s = v.to(dtype), None if state is None else state.to(torch.promote_types(dtype, torch.float32))
    if plan.impl == "reference":
        with torch.autocast(v.device.type, enabled=False):
            y, s = recurrence(queries, keys, values, log_decay, s)
    elif torch.compiler.is_compiling():
        y, s = linear_attention_op(queries, keys, values, log_decay, s, plan.chunk, final_state)
    elif torch.is_grad_enabled():
        y, s = LinearAttentionFunction.apply(plan.chunk, final_state, values, log_decay, s, *queries, *keys)
    else:
        y, s = forward(queries, keys, values, log_decay, s, plan.chunk, final_state)
    return y.to(v.dtype), s if final_state else None


def resolve(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
    impl: str = "auto",
    *,
    final_state: bool = True,
) -> Plan:
    """Return what `linear_attention` would run for these arguments, without running it.

    Raises:
        ShapeError, ConfigError: as `linear_attention` does.
    """
    queries, keys = _branches(q), _branches(k)
    _check(queries, keys, v, log_decay, state)
    return _plan(keys, v, state, chunk, impl, final_state)


def _branches(x: Branches) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _common_dtype(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor) -> torch.dtype:
    dtype = v.dtype
    for x in (*q, *k):
        dtype = torch.promote_types(dtype, x.dtype)
    asked = autocast_dtype(v.device)
    return dtype if asked is None or dtype == torch.float64 else asked


def _plan(k: tuple[Tensor, ...], v: Tensor, state: Tensor | None, chunk: int | None, impl: str, final: bool) -> Plan:
    if impl not in ("auto", "fast", "reference"):
        raise ConfigError(f"no impl {impl!r} of linear_attention" + suggest(impl, ("auto", "fast", "reference")))
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk = {chunk}: write the number of steps, 1 or more, or None")
    if impl == "reference":
        if chunk not in (None, 1):
            raise ConfigError(f'impl "reference" goes step by step, not {chunk} at once: write chunk=1 or impl="fast"')
        return Plan("reference", "recurrent", 1)
    time = v.shape[1]
    if chunk is None:
        chunk = auto_chunk(time, tuple(x.shape[-1] for x in k), v.shape[-1], state is not None, final)
    return Plan("fast", form(time, chunk), chunk)


def _check(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> None:
    """Check shapes and dtypes, never values: that would wait for the device and break a compiled graph."""
    if len(q) != len(k) or len(q) not in (1, 2):
        raise ShapeError(
            f"q has {len(q)} branches and k {len(k)}: write one tensor each (degree 1) or a pair each (degree 2)"
        )
    for name, x in _named(q, k, v):
        if x.ndim != 4:
            raise ShapeError(f"{name} has shape {_shape(x)}: write it as (batch, time, heads, features)")
    for r, (left, right) in enumerate(zip(q, k, strict=True)):
        if left.shape != right.shape:
            names = ("q", "k") if len(q) == 1 else (f"q[{r}]", f"k[{r}]")
            raise ShapeError(
                f"{names[0]} has shape {_shape(left)} and {names[1]} {_shape(right)}: a query and a key of one branch"
                " have one shape; expand the heads of the smaller"
            )
        if left.shape[:3] != v.shape[:3]:
            raise ShapeError(
                f"queries have shape {_shape(left)} and v {_shape(v)}: their first three axes are (batch, time, heads)"
                " of both"
            )
    batch, time, heads, value = v.shape
    if log_decay is not None and log_decay.shape != v.shape[:3]:
        raise ShapeError(
            f"log_decay has shape {_shape(log_decay)}: write one number a step and head, {(batch, time, heads)}"
        )
    if state is not None:
        expected = (batch, heads, math.prod([x.shape[3] for x in k]), value)
        if state.shape != expected:
            raise ShapeError(f"state has shape {_shape(state)}: write (batch, heads, features, values) = {expected}")
    optional = [("log_decay", log_decay), ("state", state)]
    for name, x in (*_named(q, k, v), *((name, x) for name, x in optional if x is not None)):
        if x.dtype not in FLOATS:
            raise ShapeError(f"{name} is {x.dtype}: write .float(), or another of float64, float32, bfloat16, float16")


def _named(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor) -> list[tuple[str, Tensor]]:
    if len(q) == 1:
        return [("q", q[0]), ("k", k[0]), ("v", v)]
    return [("q[0]", q[0]), ("q[1]", q[1]), ("k[0]", k[0]), ("k[1]", k[1]), ("v", v)]


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
