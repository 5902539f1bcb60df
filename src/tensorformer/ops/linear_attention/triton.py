"""The additive update with one decay a head, or none, on a GPU.

First the states between chunks, one chunk after another; then all chunks at once, each from the state before it.
A long sequence goes window by window, so that there are only so many states at a time. Backward computes them again,
from the last window to the first, and holds the state before every window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensorformer.ops.linear_attention.triton_launch import Launches
from tensorformer.ops.triton_kernel import DTYPES, why_not_here

WIDEST = 128  # channels of a branch

Branches = tuple[Tensor, ...]


def chunks(k: Branches, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the steps a chunk that a program has room for, the fewest first."""
    # float32 is multiplied in registers, and float16 takes twice its size.
    roomy = dtype == torch.bfloat16 or (dtype == torch.float16 and _widest(k) <= WIDEST // 2)
    return (16, 32, 64) if roomy else (16, 32)


def auto_chunk(k: Branches, dtype: torch.dtype) -> int:
    """Return the most steps a chunk, or the fewest that hold all there are."""
    *shorter, longest = chunks(k, dtype)
    for size in shorter:
        if k[0].shape[1] <= size:
            return size
    return longest


def why_not(k: Branches, dtype: torch.dtype, device: torch.device, chunk: int | None) -> str | None:
    """Say why it can't run for keys ``k`` taken in ``dtype``, and what to do about it; None where it can."""
    if dtype not in DTYPES:
        return f'computes in float32, which is too little for {dtype}: write impl="fast"'
    if _widest(k) > WIDEST:
        return f'has registers for {WIDEST} channels of a branch at most, not {_widest(k)}: write impl="fast"'
    if chunk is not None and chunk not in chunks(k, dtype):
        sizes = ", ".join(map(str, chunks(k, dtype)))
        return f"goes in chunks of {sizes} steps in {dtype}, not {chunk}: leave chunk out"
    return _why_not_here(dtype, device)


def _why_not_here(dtype: torch.dtype, device: torch.device) -> str | None:
    if reason := why_not_here(device):
        return reason
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "can't run in bfloat16 under TRITON_INTERPRET=1, whose products are wrong: write .float()"
    return None


# Asked once while tracing a graph: the answer is one of the machine's, not of the operands.
_why_not_here._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def forward(
    q: Branches,
    k: Branches,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    chunk: int,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, T, H, V) and, if `final`, the state (B, H, K, V)."""
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (v.shape[0], v.shape[2], math.prod([x.shape[3] for x in k]), v.shape[3])
    if v.numel() == 0 or 0 in shape:
        s = torch.zeros(shape, device=v.device) if state is None else state.clone()
        return y.zero_(), s if final else None
    launches = Launches(q, k, v, log_decay, chunk)
    if launches.chunks == 1 and state is None and not final:
        launches.outputs(y, None, (0, 1))
        return y, None
    carry = launches.carry(state)
    kept = launches.states() if launches.chunks > 1 or state is not None else None
    for window in launches.windows():
        launches.advance(carry, kept, window)
        launches.outputs(y, kept, window)
    return y, carry.view(shape) if final else None


def backward(
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
) -> tuple[Tensor | None, ...]:
    """Return the gradients of v, log_decay, state, and every branch of q and k, each like its operand."""
    dv, *dqk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (v, *q, *k))
    shape = (v.shape[0], v.shape[2], math.prod([x.shape[3] for x in k]), v.shape[3])
    if v.numel() == 0 or 0 in shape:
        d_initial = torch.zeros(shape, device=v.device) if d_state is None else d_state.clone()
        d_log_decay = torch.zeros_like(log_decay) if log_decay is not None and decay_needed else None
        return dv.zero_(), d_log_decay, d_initial if state_needed else None, *(x.zero_() for x in dqk)
    launches = Launches(q, k, v, log_decay, chunk)
    dy = v.new_zeros(()).expand(v.shape) if dy is None else dy
    grads = (tuple(dqk[: len(q)]), tuple(dqk[len(q) :]), dv)
    d_decay = None
    if launches.exponents is not None and decay_needed:
        d_decay = torch.empty_like(launches.exponents.octave), torch.empty_like(launches.exponents.octave)
    several = launches.chunks > 1
    kept = launches.states() if several or state is not None else None
    d_kept = launches.states() if several or d_state is not None else None
    *earlier, last = launches.windows()
    carries = [launches.carry(state)]
    for window in earlier:
        carries.append(carries[-1].clone())
        launches.advance(carries[-1], None, window)
    d_carry = launches.carry(d_state)
    for window in (last, *reversed(earlier)):
        if kept is not None:
            launches.advance(carries.pop(), kept, window)
        if d_kept is not None or state_needed:
            launches.advance_grad(dy, d_carry, d_kept, window)
        launches.gradients(dy, grads, kept, d_kept, d_decay, window)
    d_log_decay = None if log_decay is None or d_decay is None else _decay_grad(*d_decay, log_decay)
    return dv, d_log_decay, d_carry.view(shape) if state_needed else None, *dqk


def _widest(k: Branches) -> int:
    return max(x.shape[3] for x in k)


def _decay_grad(into: Tensor, past: Tensor, log_decay: Tensor) -> Tensor:
    """Return the gradient of every decay (B, T, H) from its parts, of which the second is kept a step too early."""
    into[:, :, 1:] += past[:, :, :-1]
    batch, time, heads = log_decay.shape
    whole = into.view(batch, heads, -1)[:, :, :time]
    return torch.empty_like(log_decay, memory_format=torch.contiguous_format).copy_(whole.transpose(1, 2))
