"""What a mixture of experts can't be: more choices than experts, groups that do not divide, experts that see a row."""

from __future__ import annotations

from tensorformer.config.activations import feed_forward_activation, is_gated
from tensorformer.config.row_activations import RowActivation
from tensorformer.config.schema import Experts, MoE, Router
from tensorformer.errors import ConfigError, GateError


def check_moe(moe: MoE, where: str) -> None:
    """Refuse a mixture of experts that can't be built.

    Args:
        moe: the table.
        where: its path in the recipe, which the error begins with.

    Raises:
        ConfigError: one line that names the key and the mend.
    """
    check_router(moe.router, moe.n_experts, f"{where}.router")
    if moe.shared is None and moe.n_shared_experts > 1:
        told = f"{moe.n_shared_experts} shared experts of no kind"
        raise ConfigError(f"{where}.n_shared_experts: {told}; give shared, or leave it out")
    always_one = moe.router.norm_topk_prob or moe.router.scores == "softmax_after_top_k"
    if moe.router.top_k == 1 < moe.n_experts and always_one and not moe.balance.aux_loss_coef:
        raise ConfigError(
            f"{where}.router.top_k: one expert whose weight is made to be 1 gives the router no gradient; write "
            f'scores = "softmax" or "sigmoid" with norm_topk_prob = false, or a top_k of 2 or more'
        )
    _check_activation(moe.routed, f"{where}.routed.gate", routed=True)
    if moe.shared is not None:
        _check_activation(moe.shared, f"{where}.shared.gate", routed=False)


def check_router(router: Router, n_experts: int, where: str) -> None:
    """Refuse a router that can't choose ``top_k`` of ``n_experts``; arguments and errors as of `check_moe`."""
    top_k, n_group, topk_group = router.top_k, router.n_group, router.topk_group
    if top_k > n_experts:
        raise ConfigError(
            f"{where}.top_k: a token can't go to {top_k} of {n_experts} experts; write at most {n_experts}, "
            f"or raise n_experts"
        )
    if n_experts % n_group:
        divisors = [n for n in range(1, n_experts + 1) if n_experts % n == 0]
        raise ConfigError(
            f"{where}.n_group: {n_group} does not divide n_experts = {n_experts}; write one of {divisors}"
        )
    if topk_group > n_group:
        least = "leave it out, or give n_group" if n_group == 1 else f"write at most {n_group}"
        raise ConfigError(f"{where}.topk_group: {topk_group} is more than n_group = {n_group}; {least}")
    size = n_experts // n_group
    if top_k > topk_group * size:
        raise ConfigError(
            f"{where}.topk_group: {topk_group} of {n_group} groups hold {topk_group * size} experts, and "
            f"top_k = {top_k}; write {-(-top_k // size)} or more"
        )
    if router.scores == "softmax_after_top_k" and not router.norm_topk_prob:
        raise ConfigError(
            f"{where}.norm_topk_prob: a softmax of the chosen logits sums to one by itself; leave it out, "
            f'or write scores = "softmax" for raw weights'
        )


def _check_activation(experts: Experts, where: str, *, routed: bool) -> None:
    try:
        activation = feed_forward_activation(experts)
    except (GateError, TypeError) as e:
        raise ConfigError(f"{where}: {e}") from None
    if routed and isinstance(activation, RowActivation):
        instead = '"swiglu" or "bilinear"' if is_gated(activation) else '"relu2" or "gelu"'
        raise ConfigError(
            f"{where}: {activation.name!r} needs a whole row and is a layer of its own; write an elementwise one such "
            f"as {instead} for routed experts, and keep it for shared experts or a feed_forward table"
        )
