"""What the experts of a model do with a text: who gets how much, how surely, how alike, and what it amounts to."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.lab.device import autocast
from tensorformer.lab.results import ExpertLayer
from tensorformer.nn.balancing import load_statistics
from tensorformer.nn.block import Block
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.moe import MoE
from tensorformer.nn.router import Routing

SAMPLE = 64  # tokens that every expert is shown, to see how alike they are


@torch.no_grad()
def expert_statistics(model: TensorTransformer, tokens: Int[Tensor, "b t"], precision: str) -> list[ExpertLayer]:
    """Return what each mixture of experts in ``model`` does with ``tokens``; nothing where it has none.

    Nothing is trained, and no load is counted for balance.

    Args:
        model: left as it was.
        tokens: the text.
        precision: ``"float32"`` or ``"bf16"``.
    """
    mixtures = {i: b.ffn for i, b in enumerate(cast(list[Block], list(model.layers))) if isinstance(b.ffn, MoE)}
    if not mixtures:
        return []
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: seen.__setitem__(layer, inputs[0].flatten(0, -2))

    handles = [mixture.register_forward_pre_hook(keep(i)) for i, mixture in mixtures.items()]
    was_training = model.training
    model.eval()
    try:
        with autocast(tokens.device, precision):
            model(tokens)
            return [_layer(i, mixture, seen[i]) for i, mixture in mixtures.items()]
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)


def _layer(index: int, mixture: MoE, x: Float[Tensor, "n d"]) -> ExpertLayer:
    routed, shared, routing = mixture.paths(x)
    load = load_statistics(routing)
    return ExpertLayer(
        layer=index,
        load=load.load.tolist(),
        entropy=load.entropy.item(),
        max_over_mean=load.max_over_mean.item(),
        dead=int(load.dead),
        confidence=load.confidence.item(),
        similarity=similarity(mixture, x[:SAMPLE]),
        routed_share=1.0 if shared is None else _share(routed, shared),
    )


def similarity(mixture: MoE, x: Float[Tensor, "n d"]) -> float | None:
    """Return the mean cosine between what two different routed experts write for one token; None of a single expert.

    1: they all do the same; 0: nothing in common, as of experts with random weights.
    """
    n_experts, n = mixture.config.n_experts, len(x)
    if n_experts < 2:
        return None
    inner = x if mixture.latent_in is None else mixture.latent_in(x)
    each = torch.arange(n_experts, device=x.device).repeat(n)[:, None]  # every token, shown to every expert
    one = torch.ones(n * n_experts, 1, dtype=x.dtype, device=x.device)
    routing = Routing(each, one, one.float(), one.float(), None)
    written = mixture.routed(inner.repeat_interleave(n_experts, 0), routing).float()
    directions = F.normalize(written, dim=-1).view(n, n_experts, -1)
    # Over all pairs of unit vectors u_e the cosines sum to ‖Σ u_e‖²; of that each pairs with itself to 1, or 0.
    alone = directions.square().sum((1, 2))
    pairs = directions.sum(1).square().sum(-1) - alone
    return (pairs / (n_experts * (n_experts - 1))).mean().item()


def _share(routed: Float[Tensor, "n d"], shared: Float[Tensor, "n d"]) -> float:
    """Return ‖routed‖ / (‖routed‖ + ‖shared‖), averaged over tokens; where both are 0 they are even."""
    r, s = routed.float().norm(dim=-1), shared.float().norm(dim=-1)
    return torch.where(r + s > 0, r / (r + s), 0.5).mean().item()
