"""What keeps the load of experts even by a loss, and what tells how even it is.

Losses are over real tokens only: with padding they are those of the batch without it. How often an expert was chosen
is a count and has no gradient; all gradient flows through the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.config import schema
from tensorformer.errors import ShapeError
from tensorformer.nn.router import LEAST_SUM, Routing, tokens_per_expert

LoadScale = Literal["per_token", "per_choice"]


def auxiliary_loss(routings: Sequence[Routing], load: LoadScale) -> Float[Tensor, ""]:
    """Return the load-balancing loss of one layer, or of several put together.

    L = E · Σ_e f_e P_e, where f_e is the number of choices that fell on expert e, divided by the number of tokens
    ("per_token": Σ f = k, and L = k where the load is even, as in Mixtral) or of choices ("per_choice": Σ f = 1, and
    L = 1, as in Switch Transformers and DeepSeek-V3), and P_e its mean probability. Probabilities that do not sum to
    one, as sigmoids don't, are divided by their sum first.

    Args:
        routings: one a layer, with as many experts and choices each. Of several, tokens are taken as one batch.
        load: what f is divided by.

    Returns:
        A number, in float32 or better; 0 where there is no token.

    Raises:
        ShapeError: there is no routing, or they differ in experts or choices.

    Source: Fedus et al. 2021 (arXiv 2101.03961), equations 4–6.
    """
    if len({(r.logits.shape[-1], r.indices.shape[-1]) for r in routings}) != 1:
        shapes = ", ".join(f"{r.indices.shape[-1]} of {r.logits.shape[-1]}" for r in routings)
        raise ShapeError(f"layers with one loss need as many experts and choices each, not {shapes or 'no layer'}")
    sums = [_sums(r, rows=1) for r in routings]
    put_together = _Sums(*(torch.stack(parts).sum(0) for parts in zip(*sums, strict=True)))
    return _evenness(put_together, routings[0].indices.shape[-1], load)[0]


def sequence_loss(routing: Routing, rows: int, load: LoadScale) -> Float[Tensor, ""]:
    """Return the load-balancing loss within each row of the batch, averaged over rows that have a real token.

    Args:
        routing: of N = rows · time tokens, row after row.
        rows: how many.
        load: as of `auxiliary_loss`, which this is the mean of, taken of each row alone; DeepSeek-V3's is
            "per_choice".

    Returns:
        A number, in float32 or better; 0 where there is no token.

    Raises:
        ShapeError: N tokens can't be so many equal rows.

    Source: DeepSeek-V3 (arXiv 2412.19437), equations 17–20.
    """
    n = len(routing.indices)
    if rows < 1 or n % rows:
        raise ShapeError(f"{n} tokens can't be {rows} rows of equal length; pass the batch's number of rows")
    sums = _sums(routing, rows)
    return _evenness(sums, routing.indices.shape[-1], load).sum() / (sums.tokens > 0).sum().clamp(min=1)


def z_loss(routing: Routing) -> Float[Tensor, ""]:
    """Return the mean over tokens of (log Σ_e exp z_e)², which keeps the logits z small.

    Returns:
        A number, in float32 or better; 0 where there is no token.

    Source: Zoph et al. 2022 (ST-MoE, arXiv 2202.08906), equation 5.
    """
    return _mean(routing.logits.logsumexp(-1).square(), routing.real)


def router_loss(layers: Sequence[tuple[schema.MoE, Routing]], rows: int) -> Float[Tensor, ""]:
    """Return what routing adds to a model's loss: each loss times its coefficient, summed over layers.

    Layers of one table (the same object) that says ``aux_loss = "model"`` have one auxiliary loss together.

    Args:
        layers: the table and the routing of each mixture of experts.
        rows: of the batch.

    Returns:
        A number, in float32 or better; 0, without a gradient, where all coefficients are 0.

    Raises:
        ShapeError: as of `auxiliary_loss` and `sequence_loss`.
    """
    terms: list[Tensor] = []
    together: list[tuple[schema.MoE, list[Routing]]] = []
    for moe, routing in layers:
        balance = moe.balance
        if balance.z_loss_coef:
            terms.append(balance.z_loss_coef * z_loss(routing))
        if not balance.aux_loss_coef:
            continue
        if balance.aux_loss == "sequence":
            terms.append(balance.aux_loss_coef * sequence_loss(routing, rows, balance.aux_loss_load))
            continue
        partners = [routings for table, routings in together if table is moe and balance.aux_loss == "model"]
        if partners:
            partners[0].append(routing)
        else:
            together.append((moe, [routing]))
    for moe, routings in together:
        terms.append(moe.balance.aux_loss_coef * auxiliary_loss(routings, moe.balance.aux_loss_load))
    device = layers[0][1].logits.device if layers else None
    return sum(terms, torch.zeros((), device=device))


@final
class Load(NamedTuple):
    """How even the load of one layer is, over real tokens; no gradient flows through it.

    Attributes:
        load: (E,) share of the choices that fell on each expert.
        entropy: of the load, divided by log E: 1 where it is even, 0 where one expert has all.
        max_over_mean: load of the fullest expert, in even loads.
        dead: number of experts that no token went to.
        confidence: mean over tokens of the largest probability, where they sum to one.
        squared_load: E · Σ load²: 1 where it is even, E where one expert has all.
    """

    load: Tensor
    entropy: Tensor
    max_over_mean: Tensor
    dead: Tensor
    confidence: Tensor
    squared_load: Tensor


@torch.no_grad()
def load_statistics(routing: Routing) -> Load:
    """Return the statistics of one layer's routing; without a token all but ``dead`` are 0."""
    n_experts = routing.logits.shape[-1]
    counts = tokens_per_expert(routing.indices, n_experts, routing.real)[0]
    load = counts.to(routing.logits.dtype) / counts.sum().clamp(min=1)
    return Load(
        load=load,
        entropy=torch.special.entr(load).sum() / math.log(n_experts) if n_experts > 1 else load.sum(),
        max_over_mean=n_experts * load.max(),
        dead=(counts == 0).sum(),
        confidence=_mean(_shares(routing).amax(-1), routing.real),
        squared_load=n_experts * load.square().sum(),
    )


class _Sums(NamedTuple):
    """Sums over the real tokens of each row: (rows, E) choices, (rows, E) probabilities, (rows,) tokens."""

    counts: Tensor
    mass: Tensor
    tokens: Tensor


def _sums(routing: Routing, rows: int) -> _Sums:
    n, n_experts = routing.logits.shape
    shares, real = _shares(routing), routing.real
    if real is None:
        tokens = torch.full((rows,), n // rows, device=shares.device)
    else:
        shares = torch.where(real[:, None], shares, 0.0)
        tokens = real.view(rows, -1).sum(-1)
    counts = tokens_per_expert(routing.indices, n_experts, real, rows)
    return _Sums(counts, shares.view(rows, -1, n_experts).sum(1), tokens)


def _evenness(sums: _Sums, top_k: int, load: LoadScale) -> Tensor:
    """Return E · Σ_e f_e P_e of each row."""
    mass, tokens = sums.mass, sums.tokens.clamp(min=1)
    divisor = tokens.square() * (top_k if load == "per_choice" else 1)
    return mass.shape[-1] * (sums.counts.to(mass.dtype) * mass).sum(-1) / divisor


def _shares(routing: Routing) -> Tensor:
    """Return the probabilities, made to sum to one."""
    return routing.probabilities / (routing.probabilities.sum(-1, keepdim=True) + LEAST_SUM)


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean over real tokens."""
    if real is None:
        return values.sum() / max(len(values), 1)
    return torch.where(real, values, 0.0).sum() / real.sum().clamp(min=1)
