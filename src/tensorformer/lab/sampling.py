"""Drawing each row's next token from its own logits with its own random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.errors import ConfigError


class Sampler(NamedTuple):
    """How one row's tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability are drawn (Holtzman et al. 2020).
        draws: the row's own, so that its text does not depend on its neighbours.
    """

    temperature: float
    top_p: float
    draws: torch.Generator

    @classmethod
    def seeded(cls, temperature: float, top_p: float, seed: int) -> Sampler:
        """Return a sampler at the beginning of its draws.

        Raises:
            ConfigError: an argument is out of its range.
        """
        if not (temperature == 0 or 1e-3 <= temperature < math.inf) or not 0 < top_p <= 1:
            raise ConfigError(
                f"temperature {temperature}, top_p {top_p}: "
                f"write a temperature of 0 or at least 0.001, and 0 < top_p ≤ 1"
            )
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed {seed}: write a number from 0 to 2^63 − 1")
        return cls(temperature, top_p, torch.Generator().manual_seed(seed))


def sample(logits: Float[Tensor, "b vocab"], samplers: Sequence[Sampler]) -> list[int]:
    """Return a token a row, drawn from the nucleus of ``softmax(logits / temperature)``."""
    logits = logits.float().cpu()  # the same draws whatever the device and precision
    tokens = logits.argmax(-1).tolist()
    drawn = [i for i, s in enumerate(samplers) if s.temperature > 0]
    if not drawn:
        return tokens
    temperature = torch.tensor([[samplers[i].temperature] for i in drawn])
    top_p = torch.tensor([[samplers[i].top_p] for i in drawn])
    probabilities, order = torch.softmax(logits[drawn] / temperature, dim=-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # the token that crosses top_p still belongs to the nucleus
    nucleus = torch.where(before < top_p, probabilities, 0.0)
    for i, weights, tokens_by_rank in zip(drawn, nucleus, order, strict=True):
        tokens[i] = int(tokens_by_rank[torch.multinomial(weights, 1, generator=samplers[i].draws)])
    return tokens
