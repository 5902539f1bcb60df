"""Mixtures of experts that can't be built, and what is said about them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorformer.config.check_moe import check_moe
from tensorformer.config.schema import Balance, Experts, MoE, Router
from tensorformer.errors import ConfigError

TABLE: dict[str, Any] = {
    "kind": "moe",
    "n_experts": 8,
    "routed": {"gate": "bilinear", "d_ff": 4},
    "shared": {"gate": "swiglu", "d_ff": 4},
    "router": {"top_k": 2},
}


def check(**over: Any) -> None:
    check_moe(msgspec.convert({**TABLE, **over}, MoE), "$.model.ffns.x")


def test_what_can_be_built_is_let_through() -> None:
    check()
    check(router={"top_k": 8})
    check(router={"top_k": 3, "n_group": 4, "topk_group": 2, "scores": "sigmoid"})
    check(router={"top_k": 1, "scores": "softmax", "norm_topk_prob": False})
    check(router={"top_k": 1}, balance={"aux_loss_coef": 0.01})
    check(n_experts=1, router={"top_k": 1}, routed={"gate": "relu2", "d_ff": 1}, shared=None)
    check(balance={"aux_loss": "sequence", "aux_loss_load": "per_token"})
    check(shared={"gate": "polynorm", "d_ff": 4})
    check(routed={"gate": {"name": "situ", "beta": {"learned": 4.0}, "linear_beta": "none"}, "d_ff": 4})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"router": {"top_k": 9}}, r"\.router\.top_k: a token can't go to 9 of 8 experts; write at most 8, or raise"),
        (
            {"router": {"top_k": 1, "n_group": 3}},
            r"\.router\.n_group: 3 does not divide n_experts = 8; write one of \[1, 2, 4, 8\]",
        ),
        (
            {"router": {"top_k": 1, "n_group": 2, "topk_group": 3}},
            r"\.router\.topk_group: 3 is more than n_group = 2; write at most 2",
        ),
        (
            {"router": {"top_k": 1, "topk_group": 2}},
            r"\.router\.topk_group: 2 is more than n_group = 1; leave it out, or give n_group",
        ),
        (
            {"router": {"top_k": 5, "n_group": 4, "topk_group": 2}},
            r"\.router\.topk_group: 2 of 4 groups hold 4 experts, and top_k = 5; write 3 or more",
        ),
        (
            {"router": {"top_k": 2, "scores": "softmax_after_top_k", "norm_topk_prob": False}},
            r'\.router\.norm_topk_prob: .* sums to one by itself; leave it out, or write scores = "softmax"',
        ),
        ({"routed": {"gate": "swiglo", "d_ff": 4}}, r"\.routed\.gate: unknown activation 'swiglo'; .*'swiglu'"),
        ({"shared": {"gate": "situ", "d_ff": 4}}, r"\.shared\.gate: .*beta"),
        ({"shared": {"gate": {"beta": 1.0}, "d_ff": 4}}, r"\.shared\.gate: a gate table needs its name"),
        (
            {"routed": {"gate": "polynorm", "d_ff": 4}},
            r"\.routed\.gate: 'polynorm' needs a whole row and .* write .* \"relu2\" or \"gelu\" for routed experts",
        ),
        (
            {"routed": {"gate": {"name": "geglu_tanh_sparse", "sparsity": 0.5}, "d_ff": 4}},
            r'\.routed\.gate: .* "swiglu" or "bilinear" for routed experts',
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(over: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^\$\.model\.ffns\.x" + message) as e:
        check(**over)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("gate", ["swiglu", "bilinear", "relu2", "gelu"])
def test_what_is_suggested_can_be_built(gate: str) -> None:
    check(routed={"gate": gate, "d_ff": 4})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"n_experts": 0}, r"Expected `int` >= 1 - at `\$\.n_experts`"),
        ({"router": {"top_k": 0}}, r"Expected `int` >= 1 - at `\$\.router\.top_k`"),
        ({"router": {"top_k": 1, "routed_scaling_factor": 0.0}}, r"> 0.* - at `\$\.router\.routed_scaling_factor`"),
        ({"balance": {"aux_loss_coef": -0.1}}, r">= 0.* - at `\$\.balance\.aux_loss_coef`"),
        ({"router": {"top_k": 2, "capacity_factor": 1.25}}, r"unknown field `capacity_factor` - at `\$\.router`"),
        ({"capacity_factor": 1.25}, r"unknown field `capacity_factor`"),
    ],
)
def test_what_the_types_refuse(over: dict[str, Any], message: str) -> None:
    """There is no capacity: no option may drop a token."""
    with pytest.raises(msgspec.ValidationError, match=message):
        check(**over)


def test_structs_made_in_python_are_checked_too() -> None:
    moe = MoE(n_experts=4, routed=Experts("bilinear", 8), router=Router(top_k=5), balance=Balance())
    with pytest.raises(ConfigError, match=r"^moe\.router\.top_k: a token can't go to 5 of 4"):
        check_moe(moe, "moe")


@pytest.mark.parametrize("router", [{"top_k": 1}, {"top_k": 1, "scores": "softmax_after_top_k"}])
def test_a_router_that_could_not_learn_is_refused(router: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ffns\.x\.router\.top_k: .* no gradient; .*norm_topk_prob = false"):
        check(router=router)


def test_several_shared_experts_of_no_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"n_shared_experts: 3 shared experts of no kind"):
        check(shared=None, n_shared_experts=3)
