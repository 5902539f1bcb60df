"""Changing one thing in an attention layer for a while, to see what its weights make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tensorformer.nn.linear_attention import LinearAttention
from tensorformer.nn.softmax_attention import SoftmaxAttention

Attention = SoftmaxAttention | LinearAttention


def queries_scaled(mixer: Attention, factor: float) -> contextlib.AbstractContextManager[None]:
    """Multiply every query by ``factor`` where it meets the keys, behind any norm and turn."""
    return _changed(mixer, lambda q, k: (q * factor, k))


def key_scaled(mixer: Attention, step: int, factor: float) -> contextlib.AbstractContextManager[None]:
    """Multiply the key of one step by ``factor`` where it meets the queries."""

    def scale(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        axis = 2 if isinstance(mixer, SoftmaxAttention) else 1  # of time
        by = torch.where(torch.arange(k.shape[axis], device=k.device) == step, factor, 1.0).to(k.dtype)
        return q, k * by.view(-1, *[1] * (k.dim() - axis - 1))

    return _changed(mixer, scale)


def key_hidden(mixer: Attention, step: int) -> contextlib.AbstractContextManager[None]:
    """Take the key of one step away: without softmax a key of zeros is none, with softmax the mask leaves it out."""
    if isinstance(mixer, LinearAttention):
        return key_scaled(mixer, step, 0.0)

    def without(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mask(*args: Any) -> Tensor:
            seen = method(*args)
            return seen & (torch.arange(seen.shape[-1], device=seen.device) != step)

        return mask

    return _replaced(mixer, "_mask", without)


def _changed(
    mixer: Attention, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> contextlib.AbstractContextManager[None]:
    """Put ``change`` between the queries and keys of a layer and its scores; of two branches, into both."""

    def softmax(method: Callable[..., Any]) -> Callable[..., Any]:
        def projected(*args: Any) -> Any:
            q, k, v = method(*args)
            return *change(q, k), v

        return projected

    def linear(method: Callable[..., Any]) -> Callable[..., Any]:
        def operands(*args: Any) -> Any:
            found = method(*args)
            if isinstance(found.q, Tensor):
                q, k = change(found.q, found.k)
            else:
                q, k = zip(*map(change, found.q, found.k), strict=True)
            return found._replace(q=q, k=k)

        return operands

    if isinstance(mixer, SoftmaxAttention):
        return _replaced(mixer, "_projected", softmax)
    return _replaced(mixer, "_operands", linear)


@contextlib.contextmanager
def _replaced(mixer: Attention, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    own = mixer.__dict__  # of this object alone, before its class
    before = {name: own[name]} if name in own else {}
    own[name] = wrap(getattr(mixer, name))
    try:
        yield
    finally:
        del own[name]
        own.update(before)
