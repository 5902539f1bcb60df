"""The contract of linear attention: what goes in and out, and what runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.ops.autocast import autocast_dtype
from tensorformer.ops.linear_attention import triton
from tensorformer.ops.linear_attention.check import check_operands, check_switches
from tensorformer.ops.linear_attention.compiled import linear_attention_op
from tensorformer.ops.linear_attention.compiled_general import general_op
from tensorformer.ops.linear_attention.function import KERNELS, AdditiveFunction
from tensorformer.ops.linear_attention.general import GeneralFunction, Inputs
from tensorformer.ops.linear_attention.general import forward as general_forward
from tensorformer.ops.linear_attention.plan import Plan, auto_chunk, form, general_chunk
from tensorformer.ops.linear_attention.reference import recurrence
from tensorformer.ops.linear_attention.segments import masked

Branches = Tensor | tuple[Tensor, Tensor]
_SIMPLE = 'has kernels for the additive update with one decay a head, or none: write impl="fast"'


def linear_attention(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Branches | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
    impl: str = "auto",
    *,
    beta: Tensor | None = None,
    update: str = "additive",
    segments: Tensor | None = None,
    final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally through a state of fixed size, with keys of degree one or two.

    S_t = D_t S_{t−1} + β_t φ(k_t) (v_t − [delta] φ(k_t)ᵀ D_t S_{t−1})ᵀ and y_t = φ(q_t)ᵀ S_t, where φ(x) = x for
    one branch and φ(x) = x₁ ⊗ x₂ for two (row-major: feature i·K₂ + j is x₁ᵢ x₂ⱼ), so that two branches score a
    pair of steps by (q₁·k₁)(q₂·k₂). D_t = exp(log_decay_t): one number a head, or one a channel, which at degree
    two is the product of one set a branch. Nothing is scaled or normalised: the delta rule is stable only for
    β‖φ(k)‖² ≤ 2. Sums and the state are kept in float32 or better.

    Under autocast q, k and v are taken in its dtype (float64 stays), otherwise in their common one.
    For backward the additive update with one decay a head, or none, saves its operands and nothing else; the
    others, computed in float32 or better throughout, also the state before every 64th step or so. Segments, shared
    heads and a beta of the additive update cost a copy of what they change. A second derivative is right too, and
    costs what the reference costs; inside `torch.compile` it raises.
    `triton` has kernels for the additive update with one decay a head, or none. They hold 64 MiB of states at a time,
    backward twice that and the state before each 64 MiB. `auto` takes it on a CUDA device where it can, but for a
    single step of decoding.

    Args:
        q, k: one tensor (B, T, H_k, K₁), or a pair of (B, T, H_k, K_r), of any float dtype and strides.
        v: (B, T, H, V), with H a multiple of H_k; H / H_k neighbouring heads of v share a query and a key.
        log_decay: (B, T, H), or (B, T, H, K₁), at degree two a pair of (B, T, H, K_r): natural logarithm of the
            decay of each step, meant to be ≤ 0 (never checked); −inf forgets all that came before. Its gradient
            there is zero.
        state: (B, H, K, V) with K = ∏ K_r, the state before the first step; zero where not given.
        chunk: steps a chunk. 1 is the recurrence, T or more the quadratic form; by default the cheapest.
        impl: "auto", "fast", "triton", or "reference" (step by step, differentiable any number of times).
        beta: (B, T, H), how much of each step is written; one where not given.
        update: "additive", or "delta": a step writes what its key does not already find.
        segments: (B, T) integers. −1 (any negative number) is padding, which leaves the state as it is and whose
            y is zero. A number unlike that of the last step that was no padding starts a new document from an
            empty state (NaN reaches later documents of its row, though). The first document of a row goes on from
            `state`; the final state is that of its last.
        final_state: whether to work out the state after the last step. Training rarely needs it, and at short
            T it costs more than all the rest.

    Returns:
        y (B, T, H, V) in v's dtype, and the state (B, H, K, V) in float32 or better, or None if not asked for.

    Raises:
        ShapeError: shapes or dtypes do not fit together.
        ConfigError: there is no such `impl` or `update`, it has no such `chunk`, or it can't run here.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236); in chunks: Yang et al. 2024 (arXiv 2312.06635); the delta
    rule: Yang et al. 2024 (arXiv 2406.06484, 2412.06464).
    """
    x, plan = _checked(q, k, v, log_decay, state, chunk, impl, beta, update, segments, final_state)
    s = None if state is None else state.to(torch.promote_types(x.v.dtype, torch.float32))
    if plan.impl == "reference":
        with torch.autocast(v.device.type, enabled=False):
            y, s = recurrence(x.q, x.k, x.v, x.log_decay, s, x.beta, update == "delta", segments)
    else:
        y, s = _fast(_plain(x, segments, update), s, plan, final_state)
    return y.to(v.dtype), s if final_state else None


def resolve(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Branches | None = None,
    state: Tensor | None = None,
    chunk: int | None = None,
    impl: str = "auto",
    *,
    beta: Tensor | None = None,
    update: str = "additive",
    segments: Tensor | None = None,
    final_state: bool = True,
) -> Plan:
    """Return what `linear_attention` would run for these arguments, without running it.

    Raises:
        ShapeError, ConfigError: as `linear_attention` does.
    """
    return _checked(q, k, v, log_decay, state, chunk, impl, beta, update, segments, final_state)[1]


def _checked(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Branches | None,
    state: Tensor | None,
    chunk: int | None,
    impl: str,
    beta: Tensor | None,
    update: str,
    segments: Tensor | None,
    final: bool,
) -> tuple[Inputs, Plan]:
    """Check everything; return the operands in the dtype they are taken in, and the plan."""
    x = Inputs(_branches(q), _branches(k), v, () if log_decay is None else _branches(log_decay), beta)
    check_switches(impl, chunk, update)
    check_operands(x.q, x.k, x.v, x.log_decay, state, beta, segments)
    dtype = _common_dtype(x.q, x.k, v)
    plan = _plan(x, dtype, update == "delta", state is not None, chunk, impl, final)
    if any(b.dtype != dtype for b in (*x.q, *x.k, v)):
        queries, keys = (tuple(b.to(dtype) for b in branches) for branches in (x.q, x.k))
        x = x._replace(q=queries, k=keys, v=v.to(dtype))
    return x, plan


def _plan(x: Inputs, dtype: torch.dtype, delta: bool, initial: bool, chunk: int | None, impl: str, final: bool) -> Plan:
    """Return what runs for operands taken in `dtype`, with a state at first and at last or not."""
    general = delta or _a_channel(x)
    time, key_dims = x.v.shape[1], tuple(b.shape[-1] for b in x.k)
    if impl == "reference":
        return Plan("reference", "recurrent", 1)
    if impl == "triton" or (impl == "auto" and x.v.device.type == "cuda" and not (time == 1 and initial)):
        reason = _SIMPLE if general else triton.why_not(x.k, dtype, x.v.device, chunk)
        if reason is None:
            chunk = chunk or triton.auto_chunk(x.k, dtype)
            return Plan("triton", form(time, chunk), chunk)
        if impl == "triton":
            raise ConfigError(f'impl "triton" of linear_attention {reason}')
    if chunk is None and general:
        chunk = general_chunk(time, key_dims, delta)
    elif chunk is None:
        chunk = auto_chunk(time, key_dims, x.v.shape[-1], initial, final)
    return Plan("fast", form(time, chunk), chunk)


def _plain(x: Inputs, segments: Tensor | None, update: str) -> Inputs:
    """Return operands without segments and shared heads, and with a beta under the delta rule and only there."""
    q, k, v, log_decay, beta = x
    if segments is not None:
        q, k, v, log_decay, beta = masked(q, k, v, log_decay, beta, segments)
    heads = v.shape[2]
    if q[0].shape[2] != heads:
        q, k = (tuple(b.repeat_interleave(heads // b.shape[2], 2) for b in branches) for branches in (q, k))
    if update == "delta":
        beta = v.new_ones(()).expand(v.shape[:3]) if beta is None else beta
    elif beta is not None:
        v, beta = (v * beta.unsqueeze(3)).to(v.dtype), None
    return Inputs(q, k, v, log_decay, beta)


def _fast(x: Inputs, state: Tensor | None, plan: Plan, final: bool) -> tuple[Tensor, Tensor | None]:
    chunk = plan.chunk
    if x.beta is not None or _a_channel(x):
        if torch.compiler.is_compiling():
            leaves = [*x.all(), *(() if state is None else (state,))]
            keep = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
            y, s, _ = general_op(x.all(), state, *x.form, chunk, final, keep)
            return y, s
        if torch.is_grad_enabled():
            return GeneralFunction.apply(x.form, chunk, final, state, *x.all())
        y, s, _ = general_forward(x, state, chunk, final, keep=False)
        return y, s
    q, k, v, log_decay, _ = x
    decay = log_decay[0] if log_decay else None
    if torch.compiler.is_compiling():
        return linear_attention_op(q, k, v, decay, state, chunk, final, plan.impl)
    kernels = KERNELS[plan.impl]
    if torch.is_grad_enabled():
        return AdditiveFunction.apply(kernels, chunk, final, v, decay, state, *q, *k)
    return kernels.forward(q, k, v, decay, state, chunk, final)


def _a_channel(x: Inputs) -> bool:
    return bool(x.log_decay) and x.log_decay[0].ndim == 4


def _branches(x: Branches) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _common_dtype(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor) -> torch.dtype:
    dtype = v.dtype
    for x in (*q, *k):
        dtype = torch.promote_types(dtype, x.dtype)
    asked = autocast_dtype(v.device)
    return dtype if asked is None or dtype == torch.float64 else asked
