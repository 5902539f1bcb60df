"""The whole mixture-of-experts block of transformers' models, with the same weights: output and all gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tensorformer.config.schema import Balance, Experts, MoE, Router
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.moe import MoE as Layer

pytestmark = pytest.mark.real
pytest.importorskip("transformers")

D, D_FF, EXPERTS, TOP_K, SHARED = 24, 10, 8, 3, 2
GROUPS: dict[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}


class Pair(NamedTuple):
    """A peer's block, ours, and of each of our parameters the tensor of the peer's that it is."""

    peer: nn.Module
    ours: Layer
    same: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def modeling(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def gate_of(act: str) -> str:
    return "bilinear" if act == "linear" else "swiglu"


def eager(config: Any) -> Any:
    config._experts_implementation = "eager"
    return config


def stacked(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ours of Mixtral's and its likes', whose experts keep (out, in)."""
    return {
        "router.proj.weight": theirs["gate.weight"],
        "routed.gate_up": theirs["experts.gate_up_proj"].mT,
        "routed.down": theirs["experts.down_proj"].mT,
    }


def mixtral(act: str) -> Pair:
    m = modeling("mixtral")
    sizes: dict[str, Any] = {"hidden_size": D, "intermediate_size": D_FF, "hidden_act": act}
    config = m.MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, **sizes)
    ours = MoE(n_experts=EXPERTS, routed=Experts(gate_of(act), D_FF), router=Router(top_k=TOP_K))
    return Pair(m.MixtralSparseMoeBlock(eager(config)), Layer(ours, D), stacked)


def qwen(act: str, norm: bool) -> Pair:
    m = modeling("qwen3_moe")
    sizes: dict[str, Any] = {"hidden_size": D, "moe_intermediate_size": D_FF, "hidden_act": act}
    config = m.Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=norm, **sizes)
    router = Router(top_k=TOP_K, norm_topk_prob=norm)
    ours = MoE(n_experts=EXPERTS, routed=Experts(gate_of(act), D_FF), router=router)
    return Pair(m.Qwen3MoeSparseMoeBlock(eager(config)), Layer(ours, D), stacked)


def deepseek(act: str) -> Pair:
    """Its shared experts are one feed-forward part of twice the width: two of ours, side by side."""
    m = modeling("deepseek_v3")
    sizes: dict[str, Any] = {"hidden_size": D, "moe_intermediate_size": D_FF, "hidden_act": act, **GROUPS}
    config = m.DeepseekV3Config(n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_shared_experts=SHARED, **sizes)
    experts = Experts(gate_of(act), D_FF)
    ours = MoE(
        n_experts=EXPERTS,
        routed=experts,
        router=Router(top_k=TOP_K, scores="sigmoid", **GROUPS),
        shared=experts,
        n_shared_experts=SHARED,
        balance=Balance(bias_update_speed=0.001),
    )

    def same(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = stacked(theirs)
        for i in range(SHARED):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = theirs[f"shared_experts.{name}.weight"]
                found[f"shared.{i}.{name}.weight"] = weight.chunk(SHARED, dim=1 if name == "down_proj" else 0)[i]
        return found

    return Pair(m.DeepseekV3MoE(eager(config)), Layer(ours, D), same)


def gpt_oss() -> Pair:
    """Its gates and values are interleaved, gate first; ours lie side by side."""
    m = modeling("gpt_oss")
    config = m.GptOssConfig(hidden_size=D, intermediate_size=D_FF, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    ours = MoE(
        n_experts=EXPERTS,
        routed=Experts({"name": "swiglu_oai", "alpha": 1.702, "limit": 7.0}, D_FF, bias=True),
        router=Router(top_k=TOP_K, scores="softmax_after_top_k", bias=True),
    )

    def apart(t: Tensor) -> Tensor:
        return torch.cat((t[..., ::2], t[..., 1::2]), -1)

    def same(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "router.proj.weight": theirs["router.weight"],
            "router.proj.bias": theirs["router.bias"],
            "routed.gate_up": apart(theirs["experts.gate_up_proj"]),
            "routed.gate_up_bias": apart(theirs["experts.gate_up_proj_bias"]),
            "routed.down": theirs["experts.down_proj"],
            "routed.down_bias": theirs["experts.down_proj_bias"],
        }

    return Pair(m.GptOssMLP(eager(config)), Layer(ours, D), same)


PEERS: dict[str, Callable[[], Pair]] = {
    "Mixtral": lambda: mixtral("silu"),
    "Mixtral, linear": lambda: mixtral("linear"),
    "Qwen3-MoE": lambda: qwen("silu", True),
    "Qwen3-MoE, linear, raw weights": lambda: qwen("linear", False),
    "DeepSeek-V3": lambda: deepseek("silu"),
    "DeepSeek-V3, linear": lambda: deepseek("linear"),
    "gpt-oss": gpt_oss,
}


def filled(name: str) -> Pair:
    """Return a pair with the same weights, all of them drawn, so that everything they do matters."""
    pair = PEERS[name]()
    with torch.no_grad():
        for p in pair.peer.parameters():
            p.copy_(torch.randn(p.shape) * 0.4)
        copied = pair.same(dict(pair.peer.named_parameters()))
        ours = dict(pair.ours.named_parameters())
        assert copied.keys() == ours.keys()
        for key, p in ours.items():
            p.copy_(copied[key])
        bias = pair.ours.router.correction_bias
        if bias is not None:
            theirs = pair.peer.get_buffer("gate.e_score_correction_bias")
            bias.copy_(theirs.copy_(torch.randn(EXPERTS) * 0.2))
    return pair


def check(pair: Pair, x: Tensor) -> None:
    """Fail unless the output and the gradients of the input and of all parameters agree to 1e-5 of their size."""
    dy = torch.randn_like(x)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    theirs = pair.peer(leaves[0])
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    ours = pair.ours(leaves[1])
    for layer, y in ((pair.peer, theirs), (pair.ours, ours)):
        layer.zero_grad()
        y.backward(dy)
    gradients = {n: p.grad for n, p in pair.peer.named_parameters() if p.grad is not None}
    expected = {"y": theirs.detach(), "x": leaves[0].grad, **pair.same(gradients)}
    found = {"y": ours.detach(), "x": leaves[1].grad, **{n: p.grad for n, p in pair.ours.named_parameters()}}
    assert expected.keys() == found.keys()
    for name, a in expected.items():
        b = found[name]
        assert a is not None
        assert b is not None, name
        error, largest = (a - b).abs().max(), a.abs().max()
        assert largest > 0, name
        assert error <= 1e-5 * largest, f"{name}: off by {error / largest:.3g}"


@pytest.mark.parametrize("tokens", [(3, 67), (1, 1)], ids=["many", "one"])
@pytest.mark.parametrize("name", PEERS)
def test_output_and_all_gradients_are_the_peers(name: str, tokens: tuple[int, int]) -> None:
    check(filled(name), 3 * torch.randn(*tokens, D))


@pytest.mark.parametrize("name", PEERS)
def test_one_row_of_the_router_a_little_off_is_caught(name: str) -> None:
    pair = filled(name)
    with torch.no_grad():
        pair.ours.router.proj.weight[1].mul_(1.001)
    with pytest.raises(AssertionError):
        check(pair, 3 * torch.randn(3, 67, D))


def test_the_gates_that_have_limits_meet_them() -> None:
    """Else the clamps of gpt-oss's gate would not have been compared."""
    pair, x = filled("gpt-oss"), 3 * torch.randn(201, D)
    routed = pair.ours.routed
    pre = torch.einsum("nd,edf->enf", x, routed.gate_up)
    g, u = pre.chunk(2, -1)
    assert (g > 7).float().mean() > 0.01
    assert (u.abs() > 7).float().mean() > 0.01


def test_gate_and_value_taken_for_each_other_are_caught() -> None:
    pair = filled("gpt-oss")
    with torch.no_grad():
        for t in (pair.ours.routed.gate_up, pair.ours.routed.gate_up_bias):
            assert t is not None
            t.copy_(torch.cat(t.chunk(2, -1)[::-1], -1))
    with pytest.raises(AssertionError):
        check(pair, 3 * torch.randn(3, 67, D))


def test_shared_experts_each_are_at_work() -> None:
    for i in range(SHARED):
        pair = filled("DeepSeek-V3")
        assert pair.ours.shared is not None
        shared = pair.ours.shared[i]
        assert isinstance(shared, FeedForward)
        with torch.no_grad():
            shared.down_proj.weight.mul_(1.001)
        with pytest.raises(AssertionError):
            check(pair, 3 * torch.randn(3, 67, D))
