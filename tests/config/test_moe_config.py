"""Mixtures of experts in recipes: what they say and leave out, what they weigh, and matching them in two sizes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode

from tensorformer.config.count import active_parameters, forward_flops, parameters, training_flops
from tensorformer.config.count_feed_forward import (
    active_feed_forward_weights,
    feed_forward_products,
    feed_forward_weights,
)
from tensorformer.config.load import load_config, run_from_toml, run_hash, to_toml, variant_run
from tensorformer.config.match import match, match_with_active
from tensorformer.config.schema import (
    Balance,
    Experts,
    FeedForward,
    Layer,
    Learned,
    Model,
    MoE,
    Recipe,
    Router,
    SoftmaxAttention,
)
from tensorformer.config.shapes import blocks
from tensorformer.config.widths import widths, with_widths
from tensorformer.errors import ConfigError
from tensorformer.lab.plan import Planned, plan
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.moe import MoE as MoELayer
from tests.recipes import RECIPES, TINY

MIXTURE = """
[model.ffns.moe]
kind = "moe"
n_experts = 6
routed = { gate = "bilinear", d_ff = 8 }
shared = { gate = "swiglu", d_ff = 12 }
router = { top_k = 2 }
"""
WITH_MOE = TINY.replace("[model.ffns.bilinear]", MIXTURE + "\n[model.ffns.bilinear]").replace(
    'layers = [{ mixer = "softmax", ffn = "swiglu" }]',
    'layers = [{ mixer = "softmax", ffn = "swiglu" }, { mixer = "softmax", ffn = "moe" }]',
)


def load(tmp_path: Path, *changes: tuple[str, str]) -> Any:
    text = WITH_MOE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "r.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_what_a_table_leaves_out(tmp_path: Path) -> None:
    found = load(tmp_path).model.ffns["moe"]
    assert found == MoE(
        n_experts=6,
        routed=Experts(gate="bilinear", d_ff=8, bias=False),
        router=Router(
            top_k=2,
            scores="softmax",
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            bias=False,
        ),
        shared=Experts(gate="swiglu", d_ff=12, bias=False),
        n_shared_experts=1,
        balance=Balance(
            aux_loss="layer", aux_loss_load="per_choice", aux_loss_coef=0.0, z_loss_coef=0.0, bias_update_speed=0.0
        ),
        latent=None,
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_experts = 6", "n_expert = 6", r"unknown field `n_expert` - at `\$\.model\.ffns.*did you mean 'n_experts'"),
        (
            "n_experts = 6",
            "n_experts = 6\ncapacity_factor = 1.25",
            r"`capacity_factor`.*; there is no capacity here: no token",
        ),
        ("{ top_k = 2 }", "{ top_k = 2, drop_tokens = true }", "no token is dropped, whatever the load; leave it out"),
        ("n_experts = 6\n", "", r"missing required field `n_experts` - at `\$\.model\.ffns"),
        ("n_experts = 6", "n_experts = 0", r">= 1 - at `\$\.model\.ffns"),
        ("{ top_k = 2 }", "{ top_k = 7 }", r"\$\.model\.ffns\.moe\.router\.top_k: a token can't go to 7 of 6"),
        ("{ top_k = 2 }", '{ top_k = 2, scores = "softmx" }', r"'softmx'.*did you mean 'softmax'"),
        ("{ top_k = 2 }", "{ top_k = 2, n_group = 4 }", r"\.n_group: 4 does not divide n_experts = 6"),
        ('gate = "bilinear", d_ff = 8', 'gate = "biliner", d_ff = 8', r"moe\.routed\.gate: .*'bilinear'"),
        ('gate = "bilinear", d_ff = 8', 'gate = "polynorm", d_ff = 8', r"moe\.routed\.gate: .* needs a whole row"),
        ('kind = "moe"', 'kind = "mole"', r"'mole' - at `\$\.model\.ffns.*did you mean 'moe'"),
        ('ffn = "moe"', 'ffn = "mo"', r"\$\.model\.layers\[1\]\.ffn: there is no 'mo'; did you mean 'moe'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        load(tmp_path, (old, new))
    assert "\n" not in str(e.value)


def test_a_table_survives_toml_with_all_it_can_say(tmp_path: Path) -> None:
    gate = '{ name = "swish_glu", beta = { learned = 1.5 } }'
    full = MIXTURE.replace('gate = "bilinear", ', f"gate = {gate}, bias = true, ")
    full = full.replace("{ top_k = 2 }", '{ top_k = 2, scores = "sigmoid", n_group = 3, topk_group = 2, bias = true }')
    full += 'latent = 4\nn_shared_experts = 3\nbalance = { aux_loss = "sequence", aux_loss_coef = 1e-4 }\n'
    run = variant_run(load(tmp_path, (MIXTURE, full)), "swiglu", seed=3)
    moe = run.model.ffns["moe"]
    assert isinstance(moe, MoE)
    assert moe.routed.gate == {"name": "swish_glu", "beta": Learned(1.5)}
    again = run_from_toml(to_toml(run))
    assert again == run
    assert run_hash(again) == run_hash(run)
    other = replace(run, model=replace(run.model, ffns=run.model.ffns | {"moe": replace(moe, n_shared_experts=2)}))
    assert run_hash(other) != run_hash(run)


def test_a_variant_may_change_one_gate_of_a_mixture(tmp_path: Path) -> None:
    recipe = load(tmp_path, ("[variants.swiglu]", '[variants.swiglu]\nmodel.ffns.moe.routed.gate = "swiglu"'))
    base, changed = (variant_run(recipe, name, 0).model.ffns["moe"] for name in (None, "swiglu"))
    assert isinstance(base, MoE)
    assert changed == replace(base, routed=replace(base.routed, gate="swiglu"))


def model(*ffns: FeedForward | MoE, n_layers: int | None = None, d_model: int = 16, **over: Any) -> Model:
    named = {f"f{i}": ffn for i, ffn in enumerate(ffns)}
    return Model(
        d_model=d_model,
        n_layers=n_layers or len(ffns),
        vocab_size=23,
        mixers={"a": SoftmaxAttention(n_heads=2)},
        ffns=named,
        layers=tuple(Layer(mixer="a", ffn=name) for name in named),
        **over,
    )


def hybrid(routed: int = 8, shared: int = 12, n_experts: int = 6, top_k: int = 2, **over: Any) -> MoE:
    return MoE(
        n_experts=n_experts,
        routed=Experts("bilinear", routed),
        router=Router(top_k=top_k),
        shared=Experts("swiglu", shared),
        **over,
    )


def test_first_layers_may_be_dense() -> None:
    dense = FeedForward(gate="swiglu", d_ff=40)
    layers = (Layer(mixer="a", ffn="f0", repeat=2), Layer(mixer="a", ffn="f1", repeat=3))
    found = replace(model(dense, hybrid(), n_layers=5), layers=layers)
    assert [ffn for _, ffn in blocks(found)] == ["f0", "f0", "f1", "f1", "f1"]
    assert widths(found) == {"f0": 40, "f1.routed": 8, "f1.shared": 12}
    assert parameters(found) == built(found)


def built(model: Model) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in TensorTransformer(model).parameters())


gates = st.sampled_from(["bilinear", "relu2", {"name": "swish_glu", "beta": Learned(1.0)}])
shared_gates = st.sampled_from(["swiglu", "gelu", "polynorm_glu", {"name": "swish_glu", "beta": Learned(1.0)}])
sizes = st.sampled_from([1, 3, 7, 12])
ONE = Balance(aux_loss_coef=0.01)  # without it one expert of weight 1 is refused
mixtures = st.builds(
    MoE,
    n_experts=st.sampled_from([3, 6]),
    routed=st.builds(Experts, gate=gates, d_ff=sizes, bias=st.booleans()),
    router=st.builds(Router, top_k=st.integers(1, 3), bias=st.booleans()),
    shared=st.none() | st.builds(Experts, gate=shared_gates, d_ff=sizes, bias=st.booleans()),
    n_shared_experts=st.integers(1, 3),
    latent=st.none() | sizes,
    balance=st.sampled_from([ONE, replace(ONE, bias_update_speed=0.001)]),  # of which no parameter comes
).map(lambda moe: replace(moe, n_shared_experts=moe.n_shared_experts if moe.shared else 1))


@given(mixtures)
def test_counts_are_those_of_the_model_that_is_built(moe: MoE) -> None:
    layer = MoELayer(moe, 16)
    everything = sum(p.numel() for p in layer.parameters())
    assert feed_forward_weights(moe, 16) == everything
    spared = sum(p[0].numel() for p in layer.routed.parameters()) * (moe.n_experts - moe.router.top_k)
    assert active_feed_forward_weights(moe, 16) == everything - spared
    whole = model(moe, FeedForward("relu", 5), n_layers=3)
    assert parameters(whole) == built(whole)
    assert parameters(whole) - active_parameters(whole) == 2 * spared


@given(mixtures, st.sampled_from([1, 7, 16]))
def test_products_are_those_that_torch_counts(moe: MoE, n: int) -> None:
    layer = MoELayer(moe, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(n, 16))
    assert counter.get_total_flops() == 2 * n * feed_forward_products(moe, 16)


def test_counts_by_hand() -> None:
    """d = 16: a router of 6, 6 experts of 3 matrices 16×8 of which a token meets 2, two shared ones of 3 of 16×12."""
    moe = hybrid(n_shared_experts=2)
    outside = 16 * 6 + 2 * 3 * 16 * 12
    assert feed_forward_weights(moe, 16) == outside + 6 * 3 * 16 * 8
    assert active_feed_forward_weights(moe, 16) == feed_forward_products(moe, 16) == outside + 2 * 3 * 16 * 8
    small = model(moe)
    attention, norms, ends = 4 * 16 * 16, 3 * 16, 2 * 23 * 16
    assert active_parameters(small) == outside + 2 * 3 * 16 * 8 + attention + norms + ends
    products = active_parameters(small) - norms - 23 * 16  # looking an embedding up multiplies nothing
    assert forward_flops(small, 10) == 2 * products + 4 * 16 * 10  # scores: 2 heads of 8, 10 keys, twice
    assert training_flops(small, 10) == 3 * forward_flops(small, 10)


def test_a_model_without_a_mixture_meets_all_it_has() -> None:
    dense = model(FeedForward("swiglu", 24), tie_embeddings=True)
    assert active_parameters(dense) == parameters(dense) == built(dense)


def test_widths_are_named_by_path_and_can_be_replaced() -> None:
    no_shared = replace(hybrid(), shared=None)
    found = model(hybrid(), no_shared, FeedForward("relu", 5))
    assert widths(found) == {"f0.routed": 8, "f0.shared": 12, "f1.routed": 8, "f2": 5}
    new = with_widths(found, {"f0.shared": 3, "f1.routed": 4, "f2": 6})
    assert widths(new) == {"f0.routed": 8, "f0.shared": 3, "f1.routed": 4, "f2": 6}
    assert with_widths(found, {}) == found
    assert with_widths(new, widths(found)) == found


def check_matched(solved: Model, baseline: Model, tolerance: float, remainder: float) -> None:
    """Fail unless both sizes are the baseline's, and the remainder is the larger of the two that are left."""
    left = [f(solved) / f(baseline) - 1 for f in (parameters, active_parameters)]
    assert max(map(abs, left)) <= tolerance
    assert remainder == max(left, key=abs)


@settings(max_examples=4)
@given(
    n_experts=st.sampled_from([4, 8, 15, 31]),
    top_k=st.integers(1, 4),
    routed=st.integers(20, 80),
    shared=st.integers(40, 200),
    start=st.tuples(st.integers(1, 90), st.integers(1, 90)),
)
def test_both_sizes_are_met_where_two_widths_can_meet_them(
    n_experts: int, top_k: int, routed: int, shared: int, start: tuple[int, int]
) -> None:
    """The baseline has other experts than the model, which could have been as large: its widths are drawn."""
    reachable = model(hybrid(routed, shared, n_experts, top_k), d_model=32)
    other = hybrid(start[0], start[1], n_experts, top_k)
    solved = match_with_active(model(other, d_model=32), reachable, 1, tolerance=0.03)
    check_matched(solved.model, reachable, 0.03, solved.remainder)


def test_mixtures_of_other_shape_are_matched_in_both_sizes() -> None:
    baseline = model(hybrid(64, 128, 16, 2), d_model=96)
    for n_experts, top_k, gate in ((15, 1, "bilinear"), (32, 4, "relu2")):
        other = replace(hybrid(64, 128, n_experts, top_k), routed=Experts(gate, 64))
        solved = match_with_active(model(other, d_model=96), baseline, 4, tolerance=0.02)
        check_matched(solved.model, baseline, 0.02, solved.remainder)
        assert all(width % 4 == 0 for width in widths(solved.model).values())


def test_proportions_within_either_set_are_kept() -> None:
    pair = model(hybrid(40, 30, 8, 2), hybrid(80, 90, 8, 2), d_model=32)
    baseline = model(hybrid(75, 80, 8, 2), n_layers=2, d_model=32)
    found = widths(match_with_active(pair, baseline, 1, tolerance=0.02).model)
    assert found["f1.routed"] / found["f0.routed"] == pytest.approx(2, rel=0.05)
    assert found["f1.shared"] / found["f0.shared"] == pytest.approx(3, rel=0.08)


def test_sizes_out_of_reach_are_refused_in_one_line() -> None:
    baseline = model(hybrid(64, 128, 16, 2), d_model=96)
    for other in (
        hybrid(64, 128, 4, 4),  # a token meets all of it
        replace(hybrid(64, 128, 16, 2), shared=None),  # one width for two sizes
        FeedForward("swiglu", 64),
    ):
        with pytest.raises(ConfigError, match=r"no d_ff that is a multiple of 4 comes within 0\.5%.*is off by") as e:
            match_with_active(model(other, d_model=96), baseline, 4, tolerance=0.005)
        assert "\n" not in str(e.value)


def test_a_model_of_one_width_is_matched_where_its_two_sizes_agree() -> None:
    plain = replace(hybrid(40, 1, 8, 2), shared=None)
    baseline = model(plain, n_layers=2, d_model=32)
    start = model(replace(plain, routed=Experts("bilinear", 3)), n_layers=2, d_model=32)
    solved = match_with_active(start, baseline, 1, tolerance=0.001)
    assert widths(solved.model) == {"f0.routed": 40}
    assert solved.remainder == 0
    dense = model(FeedForward("swiglu", 40), d_model=32)
    relu = match_with_active(model(FeedForward("relu", 3), d_model=32), dense, 1, tolerance=0.001)
    assert widths(relu.model) == {"f0": 60}


@pytest.mark.parametrize("measure", [parameters, active_parameters])
def test_one_size_alone_scales_both_widths_together(measure: Any) -> None:
    baseline = model(hybrid(40, 60, 8, 2), d_model=32)
    solved = match(model(hybrid(4, 6, 8, 2), d_model=32), measure(baseline), measure, 1, tolerance=0.01)
    assert widths(solved.model)["f0.shared"] == pytest.approx(1.5 * widths(solved.model)["f0.routed"], abs=1)


@functools.cache
def planned(name: str) -> tuple[Recipe, list[Planned]]:
    recipe = load_config(RECIPES / f"{name}.toml")
    return recipe, plan(recipe)


@pytest.mark.parametrize("name", ["moe-hybrid", "ffn-depth"])
def test_the_recipes_compare_at_equal_sizes(name: str) -> None:
    recipe, (baseline, *others) = planned(name)
    assert recipe.compare is not None
    assert len(recipe.compare.seeds) >= 3
    assert baseline.name == recipe.compare.baseline
    for p in others:
        for mine, its in ((p.n_params, baseline.n_params), (p.n_active, baseline.n_active)):
            assert abs(mine / its - 1) <= recipe.compare.tolerance, p.name
        assert (p.n_active < p.n_params) == (name == "moe-hybrid")


def test_the_hybrid_recipe_has_the_four_and_a_sweep() -> None:
    models = {p.name: p.run.model for p in planned("moe-hybrid")[1]}

    def pair(name: str) -> tuple[object, object]:
        first = models[name].ffns[blocks(models[name])[0][1]]
        assert isinstance(first, MoE)
        assert first.shared is not None
        return first.routed.gate, first.shared.gate

    assert pair("swiglu") == ("swiglu", "swiglu")
    assert pair("bilinear") == ("bilinear", "bilinear")
    assert pair("bilinear-routed") == ("bilinear", "swiglu")
    assert pair("bilinear-shared") == ("swiglu", "bilinear")
    shares = set()
    for found in models.values():
        for ffn in found.ffns.values():
            assert isinstance(ffn, MoE)
            routed = ffn.router.top_k * ffn.routed.d_ff
            shares.add(round(4 * routed / (routed + (ffn.shared.d_ff if ffn.shared else 0))))
    assert shares >= {1, 2, 3}


def test_the_depth_recipe_has_three_bilinear_layers_to_one() -> None:
    models = {p.name: p.run.model for p in planned("ffn-depth")[1]}
    assert [ffn for _, ffn in blocks(models["three-to-one"])] == (["bilinear"] * 3 + ["swiglu"]) * 2


def test_a_struct_made_in_python_is_one_read_from_toml() -> None:
    assert msgspec.convert(msgspec.to_builtins(hybrid()), MoE) == hybrid()


@pytest.mark.parametrize("order", [(0, 1, 1), (1, 1, 0)])
@pytest.mark.parametrize("dense", [32, 512])
def test_a_match_does_not_depend_on_which_width_comes_first(order: tuple[int, ...], dense: int) -> None:
    def of(n_experts: int, top_k: int) -> Model:
        parts = FeedForward("swiglu", dense), hybrid(64, 256, n_experts, top_k)
        start = model(*parts, d_model=32)
        return replace(start, n_layers=3, layers=tuple(start.layers[i] for i in order))

    solved = match_with_active(of(64, 8), of(32, 4), 4, tolerance=0.02)
    assert abs(solved.remainder) < 0.02


def test_a_dot_in_the_name_of_a_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a dot in its name"):
        load(tmp_path, ("[model.ffns.moe]", '[model.ffns."m.routed"]'), ('ffn = "moe"', 'ffn = "m.routed"'))
