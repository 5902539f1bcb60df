"""The experts of transformers' models, with the same weights: outputs and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorformer.gates import GATES, Gate
from tensorformer.ops.grouped_experts import grouped_experts

pytestmark = pytest.mark.real

TOKENS, EXPERTS, TOP_K, D, D_FF = 37, 6, 2, 24, 10


def experts(model: str, act: str) -> tuple[Any, Gate, str]:
    """Return the experts of a small random model, eager, and their gate and layout as we call them."""
    sizes = {"hidden_size": D, "num_experts_per_tok": TOP_K, "hidden_act": act}
    gate = GATES["bilinear" if act == "linear" else "swiglu"]
    if model == "mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config: Any = MixtralConfig(intermediate_size=D_FF, num_local_experts=EXPERTS, **sizes)
        made = MixtralExperts
    elif model == "qwen3_moe":
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config, made = Qwen3MoeConfig(moe_intermediate_size=D_FF, num_experts=EXPERTS, **sizes), Qwen3MoeExperts
    elif model == "deepseek_v3":
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

        config, made = (
            DeepseekV3Config(moe_intermediate_size=D_FF, n_routed_experts=EXPERTS, **sizes),
            DeepseekV3Experts,
        )
    else:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config, made = GptOssConfig(intermediate_size=D_FF, num_local_experts=EXPERTS, **sizes), GptOssExperts
        gate = GATES["swiglu_oai"].bind(alpha=1.702, limit=7.0)
    config._experts_implementation = "eager"
    return made(config), gate, "interleaved" if model == "gpt_oss" else "gate_up"


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize(
    ("model", "act"),
    [
        ("mixtral", "silu"),
        ("mixtral", "linear"),
        ("qwen3_moe", "silu"),
        ("qwen3_moe", "linear"),
        ("deepseek_v3", "silu"),
        ("gpt_oss", "silu"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_same_experts(model: str, act: str, impl: str, dtype: torch.dtype) -> None:
    peer, gate, layout = experts(model, act)
    peer = peer.to(dtype)
    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(torch.randn(p.shape) * 0.4)
    x, weights = torch.randn(TOKENS, D, dtype=dtype) * 3, torch.rand(TOKENS, TOP_K, dtype=dtype)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    indices = (torch.rand(TOKENS, EXPERTS) ** torch.linspace(0.2, 4, EXPERTS)).topk(TOP_K).indices
    dy = torch.randn(TOKENS, D, dtype=dtype)
    named = dict(peer.named_parameters())
    turned = model != "gpt_oss"  # the others keep (E, out, in)

    def ours(gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        gate_up, down = (gate_up.mT, down.mT) if turned else (gate_up, down)
        return grouped_experts(x, gate_up, down, gate, indices, weights, *biases, layout=layout, impl=impl)

    order = ["gate_up_proj", "down_proj", *(["gate_up_proj_bias", "down_proj_bias"] if not turned else [])]
    leaves = [x, weights, *(named[n] for n in order)]
    assert set(order) == set(named)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    theirs = peer(x, indices, weights)
    found = ours(*leaves[2:])
    grads, expected = (torch.autograd.grad(y, leaves, dy) for y in (found, theirs))
    for a, b in zip((found.detach(), *grads), (theirs.detach(), *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
