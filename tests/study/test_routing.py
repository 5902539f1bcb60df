"""Routing of real layers: what changing keys and queries does, and a study of whole models."""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import msgspec
import pytest
import torch
from torch import Tensor

from tensorformer.config.presets import PRESETS
from tensorformer.config.schema import LinearPreset
from tensorformer.errors import ConfigError
from tensorformer.nn.block import Block
from tensorformer.nn.linear_attention import LinearAttention
from tensorformer.study import routing_change as change
from tensorformer.study.routing import routing, run_routing, window_length
from tensorformer.study.routing_meter import LayerMeter, exchanged
from tensorformer.study.routing_result import SCALES, Head
from tensorformer.study.routing_words import findings, quartiles
from tests.study.routing_models import SOFTMAX, inputs, linear, measured, mixer, model, tokens

ALL = {"softmax": SOFTMAX, "windowed": SOFTMAX | {"window": 5}, "normed": SOFTMAX | {"qk_norm": True}}
ALL |= {preset: linear(preset) for preset in get_args(LinearPreset)}
SUMS = {name for name, preset in PRESETS.items() if preset.update == "additive" and preset.output_norm != "row"}
# A layer that adds D · v has a weight that no query scales.
HOMOGENEOUS = {name for name, preset in PRESETS.items() if not preset.skip}


@pytest.fixture(params=sorted(ALL))
def named(request: pytest.FixtureRequest) -> tuple[str, change.Attention]:
    return request.param, mixer(ALL[request.param])


@torch.no_grad()
def test_queries_scaled(named: tuple[str, change.Attention]) -> None:
    name, layer = named
    x = inputs(11)
    before = layer.weights(x)
    for scale in SCALES:
        with change.queries_scaled(layer, scale):
            after = layer.weights(x)
        if name not in PRESETS:
            power = before**scale
            torch.testing.assert_close(after, power / power.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)
        elif name == "power":
            torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-9)  # eps in its denominator does not scale
        elif name in HOMOGENEOUS:
            torch.testing.assert_close(after, before * scale ** PRESETS[name].degree, rtol=1e-9, atol=1e-12)  # pyright: ignore[reportArgumentType]
    assert torch.equal(layer.weights(x), before)


@torch.no_grad()
def test_a_key_taken_away_is_as_if_it_had_not_been(named: tuple[str, change.Attention]) -> None:
    name, layer = named
    x, step = inputs(11), 4
    before = layer.weights(x)
    with change.key_hidden(layer, step):
        after = layer.weights(x)
    others = [i for i in range(11) if i != step]
    if name not in PRESETS:
        left = before.clone()
        left[..., step] = 0
        torch.testing.assert_close(after, left / left.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)
    elif name in SUMS:
        assert torch.equal(after[..., others], before[..., others])
        below = after[..., step].clone()
        below[..., step] = 0  # where a skip remains
        assert below.abs().max() == 0
    else:
        assert torch.equal(after[:, :, :step], before[:, :, :step])  # no step before it knew
        assert not torch.allclose(after[..., others], before[..., others])
    assert torch.equal(layer.weights(x), before)


@torch.no_grad()
@pytest.mark.parametrize(
    ("table", "rate"), [(SOFTMAX, 1.0), (linear("power"), 1.0), (linear("bilinear"), 0.0), (linear("retention"), 0.0)]
)
def test_who_competes(table: dict[str, Any], rate: float) -> None:
    layer, x, step = mixer(table), inputs(15), 2
    here = layer.weights(x)[0]
    with change.key_hidden(layer, step):
        without = layer.weights(x)[0]
    with change.key_scaled(layer, step, 1.5):
        grown = layer.weights(x)[0]
    for before, after in ((without, here), (here, grown)):
        gain, taken = exchanged(before[:, step + 1 :], after[:, step + 1 :], step)
        assert gain.abs().min() > 0
        torch.testing.assert_close(-taken, rate * gain, rtol=1e-3, atol=1e-6)


def test_a_change_ends_even_after_an_error() -> None:
    layer = mixer(SOFTMAX)
    before = dict(layer.__dict__)

    def failing() -> None:
        with change.queries_scaled(layer, 2.0), change.key_hidden(layer, 1), change.key_scaled(layer, 0, 3.0):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert layer.__dict__ == before


def values_of(layer: change.Attention, x: Tensor) -> Tensor:
    """Return the values that a layer's weights multiply, (1, heads, t, v)."""
    if isinstance(layer, LinearAttention):
        x, at = layer._placed(x, None, None)
        return layer._operands(x, at, None, None).v.transpose(1, 2)
    return layer.v_proj(x).unflatten(-1, (layer.heads.n_kv_heads, -1)).transpose(1, 2)


@torch.no_grad()
def test_sums_are_those_of_the_weights(named: tuple[str, change.Attention]) -> None:
    _, layer = named
    x = inputs(13)
    seen: list[Tensor] = []
    summed = layer.output if isinstance(layer, LinearAttention) else layer.o_proj
    handle = summed.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(2)))
    y, _ = layer(x)
    handle.remove()
    meter = LayerMeter(0, "m", layer, 13, 13)
    meter.update(x, seen[0], y)
    expected = (layer.weights(x) @ values_of(layer, x))[0].square().mean(-1).sqrt()
    for head, row in zip(meter.result().heads, expected, strict=True):
        assert head.curves["sum_rms"][:4] == pytest.approx(
            [row[0].item(), row[1].item(), row[2:4].mean().item(), row[4].item()], rel=1e-9
        )


def test_the_two_claims() -> None:
    """Softmax competes and sharpens exponentially; the product does neither."""
    softmax, product = measured(SOFTMAX, name="softmax"), measured(linear("bilinear"), name="bilinear")
    for head in softmax.layers[0].heads:
        assert head.exchange["added"].rate == pytest.approx(1, abs=1e-4)
        assert head.exchange["grown"].rate == pytest.approx(1, abs=1e-3)
        one = head.log_odds[SCALES.index(1.0)]
        assert one is not None
        assert head.log_odds == pytest.approx([scale * one for scale in SCALES], rel=1e-3)
        assert head.top_share == sorted(head.top_share, key=lambda v: v or 0)
        assert head.curves["row_mass"] == pytest.approx([1] * len(softmax.keys), abs=1e-6)
    for head in product.layers[0].heads:
        for exchange in head.exchange.values():
            assert exchange.rate == 0
            assert exchange.rows > 50
            assert set(exchange.rates) <= {0.0, None}
        assert head.log_odds == pytest.approx([head.log_odds[0]] * len(SCALES), rel=1e-4)
        assert head.top_share == pytest.approx([head.top_share[0]] * len(SCALES), rel=1e-4)
    said = findings([softmax, product])
    assert said[0] == (
        "softmax: the other keys lose 1.00 for each unit of weight that an added key gains, "
        "and 1.00 for each that a longer key gains."
    )
    assert "bilinear: the other keys lose 0.00 for each unit of weight that an added key gains" in said[3]
    assert "are 4.00 times as large" in said[1]
    assert "are 1.00 times as large" in said[4]
    assert (
        "from rows of 12–16 keys to rows of 33–40, the mass of a row goes from 1 to 1, the sum over values" in said[2]
    )


def test_a_known_layer_by_distance_and_position() -> None:
    """NoPE and no queries: every key alike."""
    made = model(SOFTMAX | {"position": "none"})
    block = made.layers[0]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.mixer.get_parameter("q_proj.weight").zero_()
    run = run_routing(made, [tokens(3, 32)], 8, "even")
    (layer,) = run.layers
    assert (run.windows, run.length, run.context) == (3, 32, 8)
    assert run.keys[:4] == [(1, 1), (2, 2), (3, 4), (5, 5)]
    assert run.distances == [(0, 0), (1, 1), (2, 3), (4, 4), (5, 7)]
    for head in layer.heads:
        effective = [sum(range(a, b + 1)) / (b + 1 - a) for a, b in run.keys]
        assert head.curves["effective_keys"] == pytest.approx(effective, rel=1e-6)
        assert head.curves["evenness"][0] is None
        assert head.curves["evenness"][1:] == pytest.approx([1.0] * (len(run.keys) - 1), abs=1e-7)
        assert head.curves["row_sum_deviation"] == pytest.approx([0.0] * len(run.keys), abs=1e-6)
        late = [1 / n for n in (5, 6, 7, 8)]  # of the second half of the context
        assert head.distance[0] == pytest.approx(sum(late) / 4, rel=1e-6)
        assert head.distance[3] == pytest.approx(sum(late) / 4, rel=1e-6)
        assert head.distance[4] == pytest.approx((late[1] + 2 * late[2] + 3 * late[3]) / 6, rel=1e-6)
        assert head.log_odds == pytest.approx([0.0] * len(SCALES), abs=1e-6)


def test_how_windows_are_batched_does_not_matter_and_the_model_stays() -> None:
    made = model(SOFTMAX, linear("gdn"), linear("bilinear_delta")).train()
    made.layers[1].eval()
    before = copy.deepcopy(made)
    x = tokens(3, 21)
    together = run_routing(made, [x], 9)
    apart = run_routing(made, (row.unsqueeze(0) for row in x), 9)
    assert msgspec.json.encode(together) == msgspec.json.encode(apart)
    assert [layer.mixer for layer in together.layers] == ["m0", "m1", "m2"]
    assert [m.training for m in made.modules()] == [m.training for m in before.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), before.parameters(), strict=True))
    assert all(p.grad is None for p in made.parameters())


def test_weights_that_are_not_finite_are_left_out_and_counted() -> None:
    made = model(linear("bilinear"))
    with torch.no_grad():
        made.embed.weight[7] = torch.nan
    x = tokens(2, 20)
    x[x == 7] = 8
    clean = run_routing(made, [x], 8)
    x[0, 12] = 7
    run = run_routing(made, [x], 8, "poisoned")
    (layer,) = run.layers
    assert clean.layers[0].left_out == 0
    assert layer.left_out == 2 * (20 - 12)
    assert layer.heads[0].curves["row_mass"][:3] == clean.layers[0].heads[0].curves["row_mass"][:3]
    assert b"nan" not in msgspec.json.encode(run).lower()
    assert findings([run])[-1] == "poisoned: 16 rows are left out, a weight of theirs is not finite."


def test_layers_of_different_mixers_are_not_mixed() -> None:
    run = measured(linear("bilinear"), SOFTMAX, linear("bilinear"), name="hybrid")
    said = routing([run], "a text").findings
    assert [text.split(":")[0] for text in said[::3]] == ["hybrid · m0", "hybrid · m1", "hybrid · m2"]


@pytest.mark.parametrize(
    ("context", "tokens_there", "length"),
    [(16, 16, 16), (16, 40, 40), (16, 10_000, 64), (1024, 10**6, 2048), (4096, 10**6, 4096)],
)
def test_windows_are_up_to_four_training_contexts(context: int, tokens_there: int, length: int) -> None:
    assert window_length(context, tokens_there) == length


def test_mistakes_are_one_line() -> None:
    for call, words in (
        (lambda: window_length(16, 15), "15 tokens to read, and the run's windows have 16"),
        (lambda: run_routing(model(SOFTMAX), [], 8, "r"), "r: there are no tokens"),
        (lambda: run_routing(model(SOFTMAX), [tokens(1, 1)], 8, "r"), "r: windows of 1 token"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    other = model(SOFTMAX)
    other.layers[0].mixer = torch.nn.Identity()
    with pytest.raises(ConfigError, match="r: layer 0's Identity has no attention weights to read"):
        run_routing(other, [tokens(1, 8)], 8, "r")


def test_quartiles() -> None:
    assert quartiles([None, 3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([None]) is None
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0, None]) == (2.0, 3.0, 4.0)
    assert math.isclose(quartiles([1.0, 2.0])[1], 1.5)  # pyright: ignore[reportOptionalSubscript]


def test_every_head_has_all_it_should() -> None:
    run = measured(linear("kda"), t=16)
    (layer,) = run.layers
    assert len(layer.output) == len(run.keys)
    for head in layer.heads:
        assert isinstance(head, Head)
        assert {len(values) for values in head.curves.values()} == {len(run.keys)}
        assert len(head.distance) == len(run.distances)
        assert len(head.log_odds) == len(head.top_share) == len(SCALES)
