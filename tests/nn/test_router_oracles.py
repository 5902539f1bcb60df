"""Routers and the balancing loss of transformers' models, with the same weights: choices, weights and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.nn.balancing import auxiliary_loss
from tensorformer.nn.router import Router, Routing

pytestmark = pytest.mark.real
pytest.importorskip("transformers")

D, TOKENS, EXPERTS, TOP_K = 24, 67, 16, 3


def modeling(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def mixtral() -> tuple[Any, Router]:
    m = modeling("mixtral")
    config = m.MixtralConfig(hidden_size=D, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    return m.MixtralTopKRouter(config), Router(schema.Router(top_k=TOP_K), D, EXPERTS)


def qwen(norm: bool) -> tuple[Any, Router]:
    m = modeling("qwen3_moe")
    config = m.Qwen3MoeConfig(hidden_size=D, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=norm)
    return m.Qwen3MoeTopKRouter(config), Router(schema.Router(top_k=TOP_K, norm_topk_prob=norm), D, EXPERTS)


def deepseek(norm: bool) -> tuple[Any, Router]:
    m = modeling("deepseek_v3")
    same: dict[str, Any] = {"norm_topk_prob": norm, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
    config = m.DeepseekV3Config(hidden_size=D, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, **same)
    ours = Router(schema.Router(top_k=TOP_K, scores="sigmoid", **same), D, EXPERTS, bias_update_speed=0.001)
    return m.DeepseekV3TopkRouter(config), ours


def gpt_oss() -> tuple[Any, Router]:
    m = modeling("gpt_oss")
    config = m.GptOssConfig(hidden_size=D, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    ours = Router(schema.Router(top_k=TOP_K, scores="softmax_after_top_k", bias=True), D, EXPERTS)
    return m.GptOssTopKRouter(config), ours


PEERS: dict[str, Callable[[], tuple[Any, Router]]] = {
    "Mixtral": mixtral,
    "Qwen3-MoE": lambda: qwen(True),
    "Qwen3-MoE, raw weights": lambda: qwen(False),
    "DeepSeek-V3": lambda: deepseek(True),
    "DeepSeek-V3, raw weights": lambda: deepseek(False),
    "gpt-oss": gpt_oss,
}


def fill(peer: Any, ours: Router) -> None:
    """Give both the same weights, biases too, which make everything they do matter."""
    nn.init.normal_(peer.weight, std=0.5)
    with torch.no_grad():
        ours.proj.weight.copy_(peer.weight)
        if ours.proj.bias is not None:
            ours.proj.bias.copy_(nn.init.normal_(peer.bias))
        if ours.correction_bias is not None:
            ours.correction_bias.copy_(nn.init.normal_(peer.e_score_correction_bias, std=0.2))


def check(peer: Any, ours: Router) -> None:
    """Fail unless the choices are the same, and the weights and gradients of every expert's weight agree."""
    x, d_weights = torch.randn(TOKENS, D), torch.randn(TOKENS, EXPERTS)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    _, weights, indices = peer(leaves[0])
    routing = ours(leaves[1])
    # One weight an expert: some peers leave the order of the chosen open.
    theirs = torch.zeros(TOKENS, EXPERTS).scatter(1, indices, weights)
    mine = torch.zeros(TOKENS, EXPERTS).scatter(1, routing.indices, routing.weights)
    assert torch.equal(indices.sort().values, routing.indices.sort().values)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for y in (theirs, mine):
        (y * d_weights).sum().backward()
    same = [*leaves, peer.weight, ours.proj.weight]
    if ours.proj.bias is not None:
        same += [peer.bias, ours.proj.bias]
    for a, b in zip(same[::2], same[1::2], strict=True):
        assert a.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_choices_weights_and_gradients_are_the_peers(name: str) -> None:
    peer, ours = PEERS[name]()
    fill(peer, ours)
    check(peer, ours)


@pytest.mark.parametrize("name", PEERS)
def test_a_weight_a_little_off_is_caught(name: str) -> None:
    peer, ours = PEERS[name]()
    fill(peer, ours)
    with torch.no_grad():
        ours.proj.weight[1].mul_(1.001)
    with pytest.raises(AssertionError):
        check(peer, ours)


def test_the_group_limit_and_the_bias_are_both_at_work() -> None:
    """Without either of them DeepSeek's router would choose otherwise here."""
    x = torch.randn(TOKENS, D)
    for change in ("n_group", "bias"):
        peer, ours = deepseek(True)
        fill(peer, ours)
        if change == "bias":
            assert ours.correction_bias is not None
            ours.correction_bias.zero_()
        else:
            ours.config = schema.Router(top_k=TOP_K, scores="sigmoid", routed_scaling_factor=2.5)
        assert not torch.equal(peer(x)[2].sort().values, ours(x).indices.sort().values)


@pytest.mark.parametrize("padded", [True, False])
def test_the_auxiliary_loss_is_mixtrals(padded: bool) -> None:
    rows, time, n_layers = 3, 21, 4
    lengths = torch.tensor([[21], [9], [1]])
    mask = torch.arange(time) >= time - lengths if padded else None  # left padding
    logits = [torch.randn(rows * time, EXPERTS, requires_grad=True) for _ in range(n_layers)]
    theirs: Any = modeling("mixtral").load_balancing_loss_func(
        tuple(logits), EXPERTS, TOP_K, None if mask is None else mask.long()
    )
    theirs_gradient = torch.autograd.grad(theirs, logits)
    real = None if mask is None else mask.flatten()
    ours = auxiliary_loss([of_logits(z, real) for z in logits], "per_token")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(ours, logits), theirs_gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    each = sum(auxiliary_loss([of_logits(z, real)], "per_token") for z in logits) / n_layers
    assert not torch.allclose(torch.as_tensor(each), theirs, rtol=1e-5)  # layers put together are not their mean


def of_logits(logits: Tensor, real: Tensor | None) -> Routing:
    router = Router(schema.Router(top_k=TOP_K), EXPERTS, EXPERTS)
    nn.init.eye_(router.proj.weight)
    return router(logits, real)
