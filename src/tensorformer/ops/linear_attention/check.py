"""What linear attention refuses: operands that do not fit together, and switches that do not exist.

Shapes and dtypes only, never values: that would wait for the device and break a compiled graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
UPDATES = ("additive", "delta")
IMPLS = ("auto", "fast", "triton", "reference")


def check_switches(impl: str, chunk: int | None, update: str) -> None:
    """Raise ConfigError for an impl, chunk or update there isn't."""
    if impl not in IMPLS:
        raise ConfigError(f"no impl {impl!r} of linear_attention" + suggest(impl, IMPLS))
    if update not in UPDATES:
        raise ConfigError(f"no update {update!r} of linear_attention" + suggest(update, UPDATES))
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk = {chunk}: write the number of steps, 1 or more, or None")
    if impl == "reference" and chunk not in (None, 1):
        raise ConfigError(f'impl "reference" goes step by step, not {chunk} at once: write chunk=1 or impl="fast"')


def check_operands(
    q: tuple[Tensor, ...],
    k: tuple[Tensor, ...],
    v: Tensor,
    log_decay: tuple[Tensor, ...],
    state: Tensor | None,
    beta: Tensor | None,
    segments: Tensor | None,
) -> None:
    """Raise ShapeError where shapes or dtypes do not fit together."""
    _check_branches(q, k, v)
    batch, time, heads, value = v.shape
    _check_decay(k, v, log_decay)
    if state is not None:
        expected = (batch, heads, math.prod([x.shape[3] for x in k]), value)
        if state.shape != expected:
            raise ShapeError(f"state has shape {_shape(state)}: write (batch, heads, features, values) = {expected}")
    if beta is not None and beta.shape != v.shape[:3]:
        raise ShapeError(f"beta has shape {_shape(beta)}: write one number a step and head, {(batch, time, heads)}")
    if segments is not None and segments.shape != v.shape[:2]:
        raise ShapeError(f"segments has shape {_shape(segments)}: write one id a step, {(batch, time)}")
    if segments is not None and segments.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"segments is {segments.dtype}: write .long(); -1 is padding, a new number a new document")
    given = [x for x in (*q, *k, v, *log_decay, state, beta) if x is not None]
    if all(x.dtype in FLOATS for x in given):
        return
    optional = [("state", state), ("beta", beta)]
    named = (*_named(q, k, v), *_numbered("log_decay", log_decay), *((n, x) for n, x in optional if x is not None))
    for name, x in named:
        if x.dtype not in FLOATS:
            raise ShapeError(f"{name} is {x.dtype}: write .float(), or another of float64, float32, bfloat16, float16")


def _check_branches(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor) -> None:
    if len(q) != len(k) or len(q) not in (1, 2):
        raise ShapeError(
            f"q has {len(q)} branches and k {len(k)}: write one tensor each (degree 1) or a pair each (degree 2)"
        )
    for name, x in _named(q, k, v):
        if x.ndim != 4:
            raise ShapeError(f"{name} has shape {_shape(x)}: write it as (batch, time, heads, features)")
    heads = v.shape[2]
    for r, (left, right) in enumerate(zip(q, k, strict=True)):
        if left.shape == right.shape and left.shape[:3] == v.shape[:3] == k[0].shape[:3]:
            continue
        if left.shape != right.shape:
            names = ("q", "k") if len(q) == 1 else (f"q[{r}]", f"k[{r}]")
            raise ShapeError(
                f"{names[0]} has shape {_shape(left)} and {names[1]} {_shape(right)}: a query and a key of one branch"
                " have one shape; expand the heads of the smaller"
            )
        if left.shape[:2] != v.shape[:2] or left.shape[2] != k[0].shape[2]:
            raise ShapeError(
                f"queries have shape {_shape(left)} and v {_shape(v)}: their first three axes are (batch, time, heads)"
                " of both"
            )
        if heads % max(1, left.shape[2]) or (left.shape[2] == 0) != (heads == 0):
            raise ShapeError(
                f"{left.shape[2]} heads of queries and {heads} of v: write as many for v, or a multiple, of which"
                " each group of neighbours shares a query and a key"
            )


def _check_decay(k: tuple[Tensor, ...], v: Tensor, log_decay: tuple[Tensor, ...]) -> None:
    if not log_decay or (len(log_decay) == 1 and log_decay[0].shape == v.shape[:3]):
        return
    channels = [(*v.shape[:3], x.shape[3]) for x in k]
    if [_shape(x) for x in log_decay] != channels:
        found = ", ".join(str(_shape(x)) for x in log_decay)
        wanted = str(channels[0]) if len(k) == 1 else f"a pair of {channels[0]} and {channels[1]}"
        raise ShapeError(
            f"log_decay has shape {found}: write one number a step and head, {_shape(v)[:3]}, or one a channel,"
            f" {wanted}"
        )


def _named(q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: Tensor) -> list[tuple[str, Tensor]]:
    return [*_numbered("q", q), *_numbered("k", k), ("v", v)]


def _numbered(name: str, branches: tuple[Tensor, ...]) -> list[tuple[str, Tensor]]:
    return [(name, branches[0])] if len(branches) == 1 else [(f"{name}[{r}]", x) for r, x in enumerate(branches)]


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
