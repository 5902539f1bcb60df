"""Giving a model tokens to go on from: a long prompt in pieces, prompts of different length side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.state import State

PIECE = 512  # tokens of a prompt that are fed at once, which bounds the memory


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]:
    """Return prompts side by side, their last tokens in the last column, and where tokens stand."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(p)) + list(p) for p in prompts]
    real = [[False] * (longest - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(rows, device=device), torch.tensor(real, device=device)


def pieces(
    tokens: Int[Tensor, "b t"], real: Bool[Tensor, "b t"] | None, size: int
) -> Iterator[tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"] | None]]:
    """Yield the columns in pieces of ``size``, the last one shorter, and where tokens stand (None: everywhere).

    Raises:
        ConfigError: ``size`` is less than 1.
    """
    if size < 1:
        raise ConfigError(f"pieces of {size} tokens: write 1 or more")
    for start in range(0, tokens.shape[1], size):
        columns = slice(start, start + size)
        mask = None if real is None or bool(real[:, columns].all()) else real[:, columns]
        yield tokens[:, columns], mask


@torch.no_grad()
def advance(
    model: TensorTransformer,
    tokens: Int[Tensor, "b t"],
    real: Bool[Tensor, "b t"] | None,
    state: State,
    logits: Float[Tensor, "b vocab"] | None,
) -> tuple[Float[Tensor, "b vocab"], State]:
    """Return the logits after the last token of each row, and the state after them.

    Args:
        model: the one.
        tokens: of one piece.
        real: where tokens stand; None: everywhere.
        state: before the piece; it stays as it is.
        logits: before the piece, which a row without a token in it keeps; None: there are none.
    """
    segments = None if real is None else torch.where(real, 0, -1)
    new, after = model.decode(tokens, state, segments)
    if real is not None and logits is not None:
        new = torch.where(real.any(1, keepdim=True), new, logits)
    return new, after


def prefill(
    model: TensorTransformer, prompts: Sequence[Sequence[int]], piece: int = PIECE
) -> tuple[Float[Tensor, "b vocab"], State]:
    """Return the logits after each prompt, and the state to go on from.

    Args:
        model: the one.
        prompts: one or more, each of at least one token.
        piece: tokens that are fed at once.

    Raises:
        ConfigError: a prompt is empty or has a token that the model does not know, or there is none.
    """
    for i, prompt in enumerate(prompts):
        check_prompt(model, prompt, f"prompt {i}")
    if not prompts:
        raise ConfigError("there is no prompt; give at least one")
    tokens, real = left_padded(prompts, device_of(model))
    state, logits = model.initial_state(len(prompts)), None
    for part, mask in pieces(tokens, real, piece):
        logits, state = advance(model, part, mask, state, logits)
    assert logits is not None
    return logits, state


def check_prompt(model: TensorTransformer, prompt: Sequence[int], where: str) -> None:
    """Raise ConfigError for a prompt that is empty or has a token that the model does not know."""
    if not prompt:
        raise ConfigError(f"{where} is empty; give at least one token")
    known = model.config.vocab_size
    if wrong := [t for t in prompt if not (isinstance(t, Integral) and 0 <= t < known)]:
        raise ConfigError(f"{where} has token {wrong[0]}; the model knows 0 to {known - 1}")


def check_tokens(model: TensorTransformer, tokens: Int[Tensor, "b t"]) -> None:
    """Raise ShapeError for tokens that are not integers, and ConfigError for one that the model does not know."""
    if tokens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"tokens are {tokens.dtype}; write .long()")
    known = model.config.vocab_size
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= known:
        raise ConfigError(f"there is token {low if low < 0 else high}; the model knows 0 to {known - 1}")


def device_of(model: TensorTransformer) -> torch.device:
    """Return where the model's weights are."""
    return model.embed.weight.device
