"""Made inputs for a gate: as tame, and as wild, as those of trained models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

D_FF, D_MODEL = 1024, 256
BATCH = 1024  # tokens
FREEDOM = 3  # of Student's t: its fourth moment is infinite

Pair = tuple[Float[Tensor, "tokens d_ff"], Float[Tensor, "tokens d_ff"]]


def _gaussian(tokens: int, draws: torch.Generator) -> Pair:
    """Return g and u from N(0, 1), independent."""
    g, u = torch.randn(2, tokens, D_FF, generator=draws)
    return g, u


def _heavy_tailed(tokens: int, draws: torch.Generator) -> Pair:
    """Return g and u from Student's t with 3 degrees of freedom over one divisor, so that both are large at once."""
    g, u = _gaussian(tokens, draws)
    divisor = torch.randn(FREEDOM, tokens, D_FF, generator=draws).square().mean(0).sqrt()
    return g / divisor, u / divisor


KINDS: dict[str, Callable[[int, torch.Generator], Pair]] = {"gaussian": _gaussian, "heavy-tailed": _heavy_tailed}


def batches(kind: str, tokens: int, seed: int) -> Iterator[Pair]:
    """Yield g and u of ``tokens`` tokens, up to 1,024 at a time; the same seed gives the same numbers."""
    draws = torch.Generator().manual_seed(seed)
    for first in range(0, tokens, BATCH):
        yield KINDS[kind](min(BATCH, tokens - first), draws)


def down_projection(seed: int) -> nn.Linear:
    """Return a random down projection, N(0, 1 / d_ff), from a stream of its own."""
    down = nn.Linear(D_FF, D_MODEL, bias=False)
    draws = torch.Generator().manual_seed(seed + (1 << 32))
    with torch.no_grad():
        down.weight.copy_(torch.randn(D_MODEL, D_FF, generator=draws) / math.sqrt(D_FF))
    return down
