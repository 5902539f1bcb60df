"""Counts from the config equal those of the built model; widths that are solved for meet their target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tensorformer.config.count import causal_flops, forward_flops, parameters
from tensorformer.config.load import load_config
from tensorformer.config.match import match
from tensorformer.config.schema import FeedForward, Layer, LinearAttention, LinearPreset, Model, SoftmaxAttention
from tensorformer.config.widths import widths
from tensorformer.errors import ConfigError
from tensorformer.lab.plan import plan
from tensorformer.nn.model import TensorTransformer
from tests.recipes import RECIPES

PRESETS: list[LinearPreset] = list(get_args(LinearPreset))


def built_parameters(model: Model) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in TensorTransformer(model).parameters())


def counted_flops(model: Model, context: int) -> float:
    """Return torch's own count for a forward pass, a token; only its composite attention is counted on a CPU."""

    def solve(a: Any, b: Any, **_: Any) -> int:
        return a[0] * a[1] ** 2 * b[2]

    built, uncounted = TensorTransformer(model), {torch.ops.aten.linalg_solve_triangular: solve}
    with (
        FlopCounterMode(display=False, custom_mapping=uncounted) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        built(torch.zeros(2, context, dtype=torch.int64))
    return counter.get_total_flops() / (2 * context)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_counts_of_every_variant_of_every_recipe(path: Path) -> None:
    recipe = load_config(path)
    assert recipe.compare is not None
    for p in plan(recipe):
        assert p.n_params == built_parameters(p.run.model), p.name
        assert abs(p.remainder) <= recipe.compare.tolerance
        context = min(recipe.train.context, 256)
        assert forward_flops(p.run.model, context) == pytest.approx(counted_flops(p.run.model, context), rel=0.02)


def example(
    preset: LinearPreset | None = None,
    gate: str = "swiglu",
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm",
    tied: bool = False,
    kv: int | None = None,
    d_ff: int = 48,
) -> Model:
    softmax = SoftmaxAttention(n_heads=4, n_kv_heads=kv)
    return Model(
        d_model=32,
        n_layers=3,
        vocab_size=71,
        norm=norm,
        tie_embeddings=tied,
        mixers={"m": LinearAttention(preset=preset, n_heads=4) if preset else softmax},
        ffns={"f": FeedForward(gate=gate, d_ff=d_ff)},
        layers=(Layer(mixer="m", ffn="f"),),
    )


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("tied", [False, True])
def test_counts_of_every_mixer(preset: LinearPreset | None, tied: bool) -> None:
    for norm in ("rms_norm", "layer_norm"):
        for gate in ("relu", "bilinear"):
            model = example(preset, gate, norm, tied, kv=None if preset else 2)
            assert parameters(model) == built_parameters(model)
    for context in (7, 64, 700):
        model = example(preset)
        assert forward_flops(model, context) == pytest.approx(counted_flops(model, context), rel=0.02)


@given(st.integers(8, 400), st.sampled_from([1, 4, 8]))
def test_a_match_is_the_nearest_width(d_ff: int, multiple_of: int) -> None:
    target = parameters(example("bilinear", "relu", d_ff=d_ff + 200))
    solved = match(example(gate="swiglu"), target, parameters, multiple_of, tolerance=1.0)
    width = widths(solved.model)["f"]
    assert width % multiple_of == 0
    for other in (width - multiple_of, width + multiple_of):
        if other > 0:
            assert abs(parameters(example(d_ff=other)) - target) >= abs(parameters(solved.model) - target)
    assert solved.remainder == parameters(solved.model) / target - 1


@pytest.mark.parametrize("context", [64, 512, 4096])
def test_both_attentions_are_matched_by_one_rule(context: int) -> None:
    """Pairs of a query and a key it may see, times what a pair costs: D + V, and one D more for a second branch."""
    pairs = (context + 1) / 2
    cases: list[tuple[LinearPreset | None, int]] = [(None, 1), ("bilinear", 2), ("linear", 1)]
    for preset, branches in cases:
        model = example(preset)
        weights = forward_flops(model, context) - model.n_layers * scores(model, context)
        per_pair = 2 * 4 * (branches * 8 + 8)
        if preset is None or context == 64:
            assert causal_flops(model, context) == pytest.approx(weights + 3 * pairs * per_pair, rel=1e-3)
        else:  # chunks: what is done is what is needed
            assert causal_flops(model, context) == forward_flops(model, context)


def scores(model: Model, context: int) -> float:
    """Return the FLOPs of a layer's scores, a token, by torch's count of the model with and without them."""
    matrices = sum(p.numel() for n, p in TensorTransformer(model).named_parameters() if "proj" in n or "head" in n)
    return (counted_flops(model, context) - 2 * matrices) / model.n_layers


def test_a_match_keeps_the_proportions_of_two_widths() -> None:
    model = example()
    ffns = {"f": FeedForward(gate="swiglu", d_ff=20), "g": FeedForward(gate="relu", d_ff=30)}
    layers = (Layer(mixer="m", ffn="f"), Layer(mixer="m", ffn="g"))
    model = msgspec.structs.replace(model, ffns=ffns | {"unused": FeedForward(gate="relu", d_ff=7)}, layers=layers)
    solved = match(model, 10 * parameters(model), parameters, 2, tolerance=0.01).model
    assert widths(solved)["g"] / widths(solved)["f"] == pytest.approx(1.5, rel=0.01)
    assert solved.ffns["unused"] == FeedForward(gate="relu", d_ff=7)


def test_a_match_that_can_not_be_met_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 64 comes within 0\.5%.*off by .*lower compare\.multiple_of"):
        match(example(), parameters(example(d_ff=20)), parameters, 64, tolerance=0.005)


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_scores_beyond_a_window_are_not_charged(window: int) -> None:
    """Counted one by one: each token sees itself and the window − 1 before it."""

    def model(window: int | None) -> Model:
        mixer = SoftmaxAttention(n_heads=4, window=window)
        return msgspec.structs.replace(example(), mixers={"m": mixer})

    context = 64
    seen = sum(min(t, window) for t in range(1, context + 1))
    everything = context * (context + 1) // 2
    spared = causal_flops(model(None), context) - causal_flops(model(window), context)
    assert spared == pytest.approx(3 * 4 * 32 * (everything - seen) / context, abs=3)
