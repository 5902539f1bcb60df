"""What is told about experts: against closed forms and loops, of models made so that the answer is known."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tensorformer.config.schema import Balance, Experts, Layer, Learned, Model, MoE, Router, SoftmaxAttention
from tensorformer.lab.experts import expert_statistics, similarity
from tensorformer.lab.results import ExpertLayer
from tensorformer.lab.saved_state import fingerprint
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.moe import MoE as MoELayer

SWISH: Any = {"name": "swish_glu", "beta": Learned(1.0)}
TABLE = MoE(
    n_experts=6,
    routed=Experts("bilinear", 8, bias=True),
    router=Router(top_k=2, bias=True),
    shared=Experts("swiglu", 12),
    balance=Balance(bias_update_speed=0.01),
)


def statistics(model: TensorTransformer) -> ExpertLayer:
    text = torch.randint(31, (8, 16), generator=torch.Generator().manual_seed(0))
    (found,) = expert_statistics(model, text, "float32")
    return found


def mixture(table: MoE) -> tuple[TensorTransformer, MoELayer]:
    model = TensorTransformer(
        Model(
            d_model=16,
            n_layers=1,
            vocab_size=31,
            mixers={"a": SoftmaxAttention(n_heads=2)},
            ffns={"f": table},
            layers=(Layer(mixer="a", ffn="f"),),
        )
    )
    return model, model.mixtures()[0]


def test_experts_that_are_one_are_alike_and_random_ones_are_not() -> None:
    for table in (TABLE, msgspec.structs.replace(TABLE, latent=4), msgspec.structs.replace(TABLE, shared=None)):
        model, layer = mixture(table)
        random = statistics(model).similarity
        assert random is not None
        assert abs(random) < 0.35
        with torch.no_grad():
            for p in layer.routed.parameters():
                p.copy_(p[:1].expand_as(p))
        assert statistics(model).similarity == pytest.approx(1, abs=1e-5)
        with torch.no_grad():
            layer.routed.down[3:] *= -1
        # Of the 30 ordered pairs 12 are alike (3·2 twice) and 18 opposite.
        assert statistics(model).similarity == pytest.approx((12 - 18) / 30, abs=1e-5)
        with torch.no_grad():
            layer.routed.down[3:] = 0
        assert statistics(model).similarity == pytest.approx(6 / 30, abs=1e-5)


def check_similarity(layer: MoELayer, written: list[torch.Tensor], x: torch.Tensor) -> None:
    """Fail unless the similarity is the mean of the cosines of all ordered pairs."""
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    cosines = [nn.functional.cosine_similarity(written[a], written[b]) for a, b in pairs]
    assert similarity(layer, x) == pytest.approx(torch.stack(cosines).mean().item(), abs=1e-5)


@torch.no_grad()
def test_similarity_is_the_mean_of_all_cosines() -> None:
    _, layer = mixture(msgspec.structs.replace(TABLE, routed=Experts(SWISH, 5)))
    x, written = torch.randn(9, 16), []
    for e in range(6):
        g, u = (x @ layer.routed.gate_up[e]).chunk(2, -1)
        written.append(g * g.sigmoid() * u @ layer.routed.down[e])
    check_similarity(layer, written, x)
    with pytest.raises(AssertionError):  # tokens in another order are other tokens
        check_similarity(layer, [w.roll(e, 0) for e, w in enumerate(written)], x)


def test_of_a_single_expert_there_is_nothing_to_be_like() -> None:
    model, _ = mixture(msgspec.structs.replace(TABLE, n_experts=1, router=Router(top_k=1)))
    found = statistics(model)
    assert found.similarity is None
    assert (found.load, found.entropy, found.max_over_mean, found.dead) == ([1.0], 1.0, 1.0, 0)
    assert found.confidence == pytest.approx(1)
    assert json.loads(msgspec.json.encode(found))["similarity"] is None


def test_the_share_of_a_path_is_that_of_its_norm() -> None:
    model, layer = mixture(msgspec.structs.replace(TABLE, shared=None))
    assert statistics(model).routed_share == 1
    model, layer = mixture(TABLE)
    assert layer.shared is not None
    down = layer.shared[0].get_parameter("down_proj.weight")
    with torch.no_grad():
        random = statistics(model).routed_share
        assert 0.2 < random < 0.8
        kept = down.clone()
        down.zero_()
        assert statistics(model).routed_share == 1
        layer.routed.down.zero_()
        assert statistics(model).routed_share == 0.5  # nothing from either
        down.copy_(kept)
        assert statistics(model).routed_share == 0


def test_a_skewed_router_leaves_experts_dead_and_is_sure() -> None:
    model, layer = mixture(TABLE)
    with torch.no_grad():
        layer.router.proj.weight.zero_()
        layer.router.proj.bias.copy_(torch.tensor([0.0, 0.0, 30.0, 0.0, 20.0, 0.0]))
    found = statistics(model)
    assert found.load == [0, 0, 0.5, 0, 0.5, 0]
    assert found.dead == 4
    assert found.max_over_mean == pytest.approx(3)
    assert found.entropy == pytest.approx(0.3868528, abs=1e-6)  # ln 2 / ln 6
    assert found.confidence == pytest.approx(1, abs=1e-4)
    with torch.no_grad():
        layer.router.proj.bias.zero_()
    even = statistics(model)
    assert even.confidence == pytest.approx(1 / 6)
    assert even.load == [0.5, 0.5, 0, 0, 0, 0]  # ties go to the lower index


def test_a_state_is_of_the_model_with_the_same_bias() -> None:
    model, layer = mixture(TABLE)
    before = fingerprint(model)
    assert layer.router.correction_bias is not None
    layer.router.correction_bias[0] += 0.01
    assert fingerprint(model) != before
