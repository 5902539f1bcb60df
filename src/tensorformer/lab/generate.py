"""Sampling text from a finished run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.data import tokenizer
from tensorformer.data.tokenizer import Tokenizer
from tensorformer.errors import CheckpointError, ConfigError
from tensorformer.lab import checkpoint, record
from tensorformer.nn.model import TensorTransformer


def load_run(folder: Path, device: torch.device) -> tuple[TensorTransformer, Tokenizer]:
    """Return the model and tokenizer of a run, from its last checkpoint."""
    run = record.read_run(folder)
    last = checkpoint.latest(folder)
    if last is None:
        raise CheckpointError(f"{folder}: has no checkpoint yet; train it first")
    model = TensorTransformer(run.model, run.seed).to(device)
    checkpoint.load(last, model)
    return model.eval(), tokenizer.load(folder)


@torch.no_grad()
def generate(
    model: TensorTransformer,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stop: int,
    vocab_size: int,
) -> Iterator[int]:
    """Yield sampled tokens one at a time.

    Args:
        model: whose last logits are sampled.
        prompt: tokens to go on from, at least one.
        n_tokens: most tokens to yield.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability are drawn (Holtzman et al. 2020).
        seed: of the draws.
        stop: token that ends the text; it is not yielded.
        vocab_size: the tokenizer's; a model may have room for more.

    Raises:
        ConfigError: an argument is out of its range.
    """
    if not (temperature == 0 or 1e-3 <= temperature < math.inf) or not 0 < top_p <= 1:
        raise ConfigError(
            f"temperature {temperature}, top_p {top_p}: write a temperature of 0 or at least 0.001, and 0 < top_p ≤ 1"
        )
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed {seed}: write a number from 0 to 2^63 − 1")
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(seed)
    logits, state = model.decode(torch.tensor([list(prompt)], device=device), model.initial_state(1))
    for _ in range(n_tokens):
        token = sample(logits[0, :vocab_size].float().cpu(), temperature, top_p, draws)
        if token == stop:
            return
        yield token
        logits, state = model.decode(torch.tensor([[token]], device=device), state)


def sample(logits: Float[Tensor, " vocab"], temperature: float, top_p: float, draws: torch.Generator) -> int:
    """Return one token drawn from the nucleus of ``softmax(logits / temperature)``."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # the token that crosses top_p still belongs to the nucleus
    nucleus = torch.where(before < top_p, probabilities, 0.0)
    return int(order[torch.multinomial(nucleus, 1, generator=draws)])
