"""Laws of the layers: causal, stateful decoding equals the whole, rows alone equal rows together, tensors explicit."""

from __future__ import annotations

import itertools
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tensorformer.config.schema import FeedForward, Layer, LinearAttention, LinearPreset, Model, SoftmaxAttention
from tensorformer.nn.feedforward import FeedForward as FeedForwardLayer
from tensorformer.nn.linear_attention import LinearAttention as LinearAttentionLayer
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.norm import unit_rms
from tensorformer.nn.rope import Rope, rotate

PRESETS: list[LinearPreset] = list(get_args(LinearPreset))
MIXERS: dict[str, SoftmaxAttention | LinearAttention] = {
    "softmax": SoftmaxAttention(n_heads=2),
    "grouped": SoftmaxAttention(n_heads=4, n_kv_heads=2, head_dim=6, qk_norm=True),
    **{p: LinearAttention(preset=p, n_heads=2, head_dim=6, value_dim=5) for p in PRESETS},
}


def config(*mixers: str, gate: str = "bilinear", n_layers: int = 2, d_model: int = 16) -> Model:
    return Model(
        d_model=d_model,
        n_layers=n_layers,
        vocab_size=50,
        mixers=MIXERS,
        ffns={"f": FeedForward(gate=gate, d_ff=24)},
        layers=tuple(Layer(mixer=m, ffn="f") for m in mixers),
    )


def double(model: Model, seed: int = 0) -> TensorTransformer:
    built = TensorTransformer(model, seed).double()
    with torch.no_grad():  # far from the small first weights, so that a mistake shows
        for p in built.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=torch.float64))
    return built


def tokens(*shape: int) -> Tensor:
    return torch.randint(50, shape)


def check_causal(model: torch.nn.Module, x: Tensor, at: int) -> None:
    """Fail unless what stands at ``at`` changes nothing before it, and something from it on."""
    changed = x.clone()
    changed[:, at] = (x[:, at] + 1) % 50
    a, b = model(x), model(changed)
    torch.testing.assert_close(a[:, :at], b[:, :at], rtol=0, atol=1e-12)
    assert not torch.allclose(a[:, at:], b[:, at:])


@pytest.mark.parametrize("mixer", MIXERS)
def test_causal(mixer: str) -> None:
    model = double(config(mixer))
    for at in (0, 5, 12):
        check_causal(model, tokens(2, 13), at)


def test_the_causality_check_catches_a_model_that_looks_ahead() -> None:
    model = double(config("softmax"))

    class LooksAhead(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x) + 1e-6 * model(x.flip(1)).flip(1)

    with pytest.raises(AssertionError):
        check_causal(LooksAhead(), tokens(2, 13), 5)


@pytest.mark.parametrize("mixer", MIXERS)
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_decoding_in_pieces_equals_the_whole(mixer: str, cuts: list[int]) -> None:
    model = double(config(mixer, "softmax"))
    x = tokens(2, sum(cuts))
    whole, state, position = model(x), model.initial_state(2), 0
    for n in cuts:
        before = [tuple(t.clone() for t in s if isinstance(t, Tensor)) for s in state]
        logits, after = model.decode(x[:, position : position + n], state)
        position += n
        torch.testing.assert_close(logits, whole[:, position - 1], rtol=1e-9, atol=1e-10)
        for kept, s in zip(before, state, strict=True):  # the old state can be decoded from again
            assert all(torch.equal(a, b) for a, b in zip(kept, [t for t in s if isinstance(t, Tensor)], strict=True))
        state = after


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_row_does_not_depend_on_its_neighbours(mixer: str) -> None:
    model = double(config(mixer))
    x = tokens(3, 9)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-11, atol=1e-12)


def test_a_pattern_is_cycled_over_depth() -> None:
    model = TensorTransformer(config("bilinear", "bilinear", "bilinear", "softmax", n_layers=6))
    kinds = [type(block.mixer).__name__ for block in model.layers]
    assert kinds == ["LinearAttention"] * 3 + ["SoftmaxAttention"] + ["LinearAttention"] * 2


@given(st.integers(1, 7), st.integers(1, 9))
def test_bilinear_feed_forward_is_a_third_order_tensor(d: int, f: int) -> None:
    layer = FeedForwardLayer(FeedForward(gate="bilinear", d_ff=f), d).double()
    t = torch.einsum("lf,fi,fj->lij", layer.down_proj.weight, layer.gate_proj.weight, layer.up_proj.weight)
    x = torch.randn(3, d, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.einsum("lij,bi,bj->bl", t, x, x), rtol=1e-12, atol=1e-12)


@given(st.integers(1, 3), st.sampled_from([2, 4, 6]), st.integers(1, 5), st.integers(1, 20))
def test_bilinear_attention_is_attention_with_kronecker_features(h: int, k: int, v: int, t: int) -> None:
    layer = LinearAttentionLayer(LinearAttention(preset="bilinear", n_heads=h, head_dim=k, value_dim=v), 8, 1e-6)
    layer = layer.double()
    x = torch.randn(2, t, 8, dtype=torch.float64)
    assert layer.rope is not None
    tables = layer.rope.tables(torch.arange(t))

    def features(projections: torch.nn.ModuleList) -> Tensor:
        a, b = (rotate(unit_rms(p(x).view(2, t, h, k), 1e-6), tables) / k**0.5 for p in projections)
        return torch.einsum("bthi,bthj->bthij", a, b).flatten(-2)

    scores = torch.einsum("bqhf,bkhf->bhqk", features(layer.q_proj), features(layer.k_proj)).tril()
    values = layer.v_proj(x).view(2, t, h, v)
    expected = layer.o_proj(torch.einsum("bhqk,bkhv->bqhv", scores, values).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 4])
def test_a_stack_of_bilinear_layers_is_a_polynomial_of_degree_two_to_the_l(n_layers: int) -> None:
    """Along an integer line, the (2^L)-th difference is a non-zero constant and the next is zero, in exact integers."""
    d, degree = 3, 2**n_layers
    draws = torch.Generator().manual_seed(n_layers)
    weights = [
        {n: torch.randint(-3, 4, (d, d), generator=draws).tolist() for n in ("gate", "up", "down")}
        for _ in range(n_layers)
    ]

    def times(w: list[list[int]], x: list[int]) -> list[int]:
        return [sum(a * b for a, b in zip(row, x, strict=True)) for row in w]

    def stack(x: list[int]) -> list[int]:
        for w in weights:
            x = times(w["down"], [g * u for g, u in zip(times(w["gate"], x), times(w["up"], x), strict=True)])
        return x

    # The layer itself computes that stack: exactly, while its integers fit into float64.
    layers = [FeedForwardLayer(FeedForward(gate="bilinear", d_ff=d), d).double() for _ in range(n_layers)]
    for layer, w in zip(layers, weights, strict=True):
        for name in ("gate", "up", "down"):
            getattr(layer, f"{name}_proj").weight.data = torch.tensor(w[name], dtype=torch.float64)
    y = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    for layer in layers[:3]:
        y = layer(y)
    if n_layers <= 3:
        assert [int(a) for a in y.tolist()] == stack([1, -1, 2])

    start, direction = [1, 2, -1], [2, -1, 1]
    line = [stack([s + n * v for s, v in zip(start, direction, strict=True)])[0] for n in range(degree + 3)]
    for _ in range(degree):
        line = [b - a for a, b in itertools.pairwise(line)]
    assert len(set(line)) == 1
    assert line[0] != 0


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_rotary_scores_depend_on_distance_alone(a: int, b: int) -> None:
    rope = Rope(6, 10_000.0).double()
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return (rotate(q, rope.tables(torch.tensor([i]))) * rotate(k, rope.tables(torch.tensor([j])))).sum().item()

    assert score(a, b) == pytest.approx(score(a + 17, b + 17), abs=1e-9)


@pytest.mark.parametrize("gate", ["relu", "swiglu", "bilinear", "geglu", "relu2"])
def test_first_weights_write_to_the_stream_at_one_scale_whatever_the_gate(gate: str) -> None:
    model = TensorTransformer(config("softmax", gate=gate, d_model=256, n_layers=2))
    x = unit_rms(torch.randn(4096, 256), 1e-6)
    layer = model.get_submodule("layers.0.ffn")
    assert isinstance(layer, FeedForwardLayer)
    rms = layer(x).square().mean().sqrt().item()
    assert rms == pytest.approx(1 / 2, rel=0.35)  # 1/√(2 · layers)


def test_first_weights_depend_on_the_seed_and_a_layers_place_alone() -> None:
    a, b = TensorTransformer(config("softmax"), seed=1), TensorTransformer(config("bilinear", "softmax"), seed=1)
    assert torch.equal(a.embed.weight, b.embed.weight)
    first, second = (m.get_parameter("layers.1.mixer.q_proj.weight") for m in (a, b))
    assert torch.equal(first, second)
    assert not torch.equal(a.embed.weight, TensorTransformer(config("softmax"), seed=2).embed.weight)
    assert not torch.equal(a.get_parameter("layers.0.mixer.q_proj.weight"), first)


@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_reach_every_parameter_and_match_differences(mixer: str) -> None:
    model = double(config(mixer, gate="swiglu"))
    x, y = tokens(2, 7), tokens(2, 7)

    def loss() -> Tensor:
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    loss().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        i = int(p.grad.abs().argmax())
        with torch.no_grad():
            flat, step = p.view(-1), 1e-6
            flat[i] += step
            up = loss()
            flat[i] -= 2 * step
            down = loss()
            flat[i] += step
        assert p.grad.view(-1)[i].item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-5, abs=1e-9), name
