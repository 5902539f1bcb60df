"""Ranges of a model and of made inputs: planted faults are found, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.load import load_config
from tensorformer.errors import ConfigError, GateError
from tensorformer.gates import GATES, Gate
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.model import TensorTransformer
from tensorformer.study.ranges import compared, ranges, synthetic_ranges
from tensorformer.study.ranges_result import LEGEND, Layer, Ranges
from tests.gates.gate_laws import GATE_NAMES, gate

D, D_FF = 12, 40


class Rows(nn.Module):
    """One feed-forward layer over rows that are looked up by token, so that its inputs are known."""

    def __init__(self, gate: str | dict[str, Any], d_ff: int = D_FF, n_tokens: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_tokens, D)
        self.ffn = FeedForward(schema.FeedForward(gate, d_ff), D)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ffn(self.embed(tokens))


def tokens(*shape: int, n: int = 50) -> Tensor:
    return torch.randint(n, shape)


def only(result: Ranges) -> Layer:
    (layer,) = result.layers
    return layer


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def state(model: nn.Module) -> dict[str, Any]:
    """Return all of a model that a study could have changed."""
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "wants": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": hooks(model),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    weights = all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))
    grads = all(x is y for x, y in zip(a["grads"], b["grads"], strict=True))
    return weights and grads and all(a[k] == b[k] for k in ("wants", "modes", "hooks"))


@pytest.mark.parametrize("gate", ["swiglu", "bilinear", {"name": "situ", "beta": 4.0, "linear_beta": 25.0}])
def test_quantities_of_a_gated_layer_are_those_of_its_formula(gate: str | dict[str, Any]) -> None:
    model, batches = Rows(gate), [tokens(3, 7), tokens(2, 5), tokens(1, 1)]
    result = ranges(model, batches, [])
    layer, activation = only(result), model.ffn.activation
    assert isinstance(activation, Gate)
    with torch.no_grad():
        x = model.embed(torch.cat([b.flatten() for b in batches]))
        g, u = model.ffn.gate_proj(x), model.ffn.up_proj(x)
        expected = {"gate": g, "up": u, "phi": activation.gate(g), "psi": activation.value(u)}
        expected["product"] = activation(g, u)
    identities = {"phi"} if gate == "bilinear" else set()
    identities |= {"psi"} if not isinstance(gate, dict) else set()
    assert layer.inside.keys() == expected.keys() - identities - {"product"}
    found = layer.inside | {"product": layer.own.product}
    for key, summary in found.items():
        values = expected[key].double().numpy()
        assert summary.count == values.size == result.tokens * D_FF
        assert (summary.min, summary.max) == pytest.approx((values.min(), values.max()), rel=1e-6)
        assert summary.rms == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)
        assert summary.negative == pytest.approx((values < 0).mean(), abs=1e-3)
    assert layer.own.gate == repr(activation)
    output = model.ffn.down_proj(expected["product"]).detach().square().sum(-1).mean().sqrt()
    assert layer.own.output == pytest.approx(float(output), rel=1e-5)


def test_a_layer_with_two_matrices() -> None:
    model = Rows("relu2")
    layer = only(ranges(model, [tokens(4, 9)], compared()))
    assert layer.inside.keys() == {"up"}
    assert layer.own.saturation.keys() == {"phi low"}
    assert layer.instead == []
    assert layer.own.product.zeros == pytest.approx(layer.inside["up"].negative)
    assert layer.own.product.negative == 0


def test_an_activation_that_couples_a_row_is_measured_from_outside() -> None:
    layer = only(ranges(Rows("polynorm_glu"), [tokens(3, 3)], compared()))
    assert layer.inside.keys() == {"gate", "up"}
    assert (layer.own.gate, layer.own.bound, layer.own.saturation) == ("polynorm_glu", None, {})
    assert [p.gate for p in layer.instead] == [repr(g) for g in compared()]
    assert layer.dead.zero == 0
    alone = only(ranges(Rows("polynorm"), [tokens(3, 3)], compared()))
    assert (alone.inside.keys(), alone.instead) == ({"up"}, [])


@pytest.mark.parametrize("beta", [0.5, -0.25])
def test_a_parameter_that_was_trained_is_taken_as_it_is_now(beta: float) -> None:
    model, batch = Rows({"name": "swish_glu", "beta": schema.Learned(1.0)}), tokens(6, 6)
    assert model.ffn.learned is not None
    with torch.no_grad():
        model.ffn.learned["beta"].fill_(beta)
        g = model.ffn.gate_proj(model.embed(batch))
        phi = g * torch.sigmoid(beta * g)
    layer = only(ranges(model, [batch], []))
    assert layer.own.gate == f"swish_glu(beta={beta})"
    assert layer.inside["phi"].min == pytest.approx(float(phi.min()), rel=1e-5)


def test_other_gates_get_the_same_inputs_and_the_own_one_is_not_measured_twice() -> None:
    model, batch = Rows("swiglu"), tokens(8, 8)
    layer = only(ranges(model, [batch], compared()))
    assert [p.gate for p in layer.products] == [repr(g) for g in compared()]
    with torch.no_grad():
        model.ffn.activation = compared()[1]
        alone = only(ranges(model, [batch], [])).own
    there = layer.products[1]  # by the formula; the model's own operator may round otherwise
    assert (there.gate, there.bound, there.saturation) == (alone.gate, alone.bound, alone.saturation)
    assert there.product.max == pytest.approx(alone.product.max, rel=1e-5)
    assert there.product.kurtosis == pytest.approx(alone.product.kurtosis, rel=1e-5)
    assert there.output == pytest.approx(alone.output, rel=1e-5)
    for a, b in zip(there.effects, alone.effects, strict=True):
        assert a.snr_db == pytest.approx(b.snr_db, abs=0.1)


def test_dead_and_faint_units_are_found() -> None:
    model = Rows("reglu")
    with torch.no_grad():
        model.embed.weight.abs_()
        model.ffn.gate_proj.weight[:5] = -1.0  # relu of something negative: zero on all tokens
        model.ffn.up_proj.weight[5:7] = 0.0  # zero by the other side
        model.ffn.gate_proj.weight[7:10] = 1e-4
        model.ffn.up_proj.weight[7:10] = 1.0
        model.ffn.gate_proj.weight[10:] = 1.0
    dead = only(ranges(model, [tokens(5, 5), tokens(5, 5)], [])).dead
    assert (dead.units, dead.zero, dead.faint) == (D_FF, 7, 3)


def test_a_unit_that_speaks_once_is_alive() -> None:
    model = Rows("reglu", d_ff=3)
    with torch.no_grad():
        model.embed.weight.fill_(-1.0)
        model.embed.weight[13] = 1.0
        model.ffn.gate_proj.weight.fill_(1.0)
        model.ffn.up_proj.weight.fill_(1.0)
    assert only(ranges(model, [torch.tensor([[1, 2], [3, 4]])], [])).dead.zero == 3
    assert only(ranges(model, [torch.tensor([[1, 2]]), torch.tensor([[13, 4]])], [])).dead.zero == 0


def test_saturation_is_found() -> None:
    model = Rows({"name": "swiglu_clamped", "limit": 1.0})
    with torch.no_grad():
        model.embed.weight.fill_(1.0)
        model.ffn.gate_proj.weight.fill_(-1.0)  # g = −12: φ is at its low limit
        model.ffn.gate_proj.weight[:10] = 1.0  # g = 12: the cap
        model.ffn.up_proj.weight.zero_()
        model.ffn.up_proj.weight[:4] = 0.5
    found = only(ranges(model, [tokens(2, 2)], [])).own.saturation
    assert {key: s.share for key, s in found.items()} == {
        "phi low": 0.75,
        "phi high": 0.25,
        "psi low": 0,
        "psi high": 0.1,
    }


def test_values_that_are_not_finite_are_counted() -> None:
    model = Rows("swiglu")
    with torch.no_grad():
        model.embed.weight[7] = torch.nan
        model.embed.weight[8, 0] = torch.inf
    layer = only(ranges(model, [torch.tensor([[1, 7, 2, 8]])], compared()))
    assert {(e.tokens, e.left_out) for e in layer.own.effects} == {(2, 2)}
    clamped = layer.instead[-1]  # has a finite answer to an infinite input
    assert {(e.tokens, e.left_out) for e in clamped.effects} == {(3, 1)}
    for product in layer.products:
        assert product.product.nan >= D_FF
    assert layer.dead.zero == 0
    assert layer.inside["gate"].nan == D_FF
    assert layer.inside["gate"].inf == D_FF


def test_a_whole_model_is_left_as_it_was(home: object) -> None:
    model = TensorTransformer(load_config("tiny.toml").model)
    model(tokens(1, 5)).sum().backward()
    model.layers[0].eval()  # modes differ between its parts
    model.head.weight.requires_grad_(False)
    before = state(model)
    result = ranges(model, [tokens(2, 16), tokens(2, 16)], compared(), "here")
    assert same(state(model), before)
    assert [layer.name for layer in result.layers] == ["layers.0.ffn", "layers.1.ffn"]
    assert result.tokens == 64
    assert all(f.startswith("here, median over 2 layers: ") for f in result.findings)
    assert model(tokens(1, 3)).requires_grad


def test_a_model_that_raises_is_left_as_it_was_too() -> None:
    model = Rows("swiglu")
    before = state(model)
    with pytest.raises(IndexError):
        ranges(model, [tokens(2, 2), torch.tensor([[1000]])], [])
    assert same(state(model), before)


def test_a_reader_that_raises_leaves_no_hook_behind() -> None:
    model = Rows("swiglu")

    def text() -> Any:
        yield tokens(2, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranges(model, text(), [])
    assert hooks(model) == 0


def test_batches_do_not_change_what_is_measured() -> None:
    model, text = Rows("swiglu"), tokens(24, 5)
    whole, parts = only(ranges(model, [text], [])), only(ranges(model, text.split(7), []))
    assert parts.dead == whole.dead
    a, b = parts.own, whole.own
    assert a.product.percentiles == pytest.approx(b.product.percentiles, rel=1e-4)
    assert a.product.kurtosis == pytest.approx(b.product.kurtosis)
    for x, y in zip(a.effects, b.effects, strict=True):
        if x.format != "nvfp4":  # its second scale is the batch's
            assert x.snr_db == pytest.approx(y.snr_db, abs=0.02)


def test_autocast_around_it_changes_no_format() -> None:
    model, batch = Rows("swiglu"), tokens(4, 4)
    plain = only(ranges(model, [batch], [])).own
    with torch.autocast("cpu", torch.bfloat16):
        inside = only(ranges(model, [batch], [])).own
    for x, y in zip(inside.effects, plain.effects, strict=True):
        assert x.snr_db == pytest.approx(y.snr_db, abs=1.5)


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        ranges(Rows("swiglu"), [], [])
    with pytest.raises(ConfigError, match="Linear has no FeedForward layer"):
        ranges(nn.Linear(2, 2), [], [])
    with pytest.raises(ConfigError, match="at least one of each"):
        synthetic_ranges([], 10)
    with pytest.raises(ConfigError, match="at least one of each"):
        synthetic_ranges(compared(), 0)
    with pytest.raises(GateError, match="beta"):
        synthetic_ranges([GATES["situ"]], 1)


def test_made_inputs_are_the_same_for_a_seed_and_for_every_gate() -> None:
    a, b, c = (synthetic_ranges(compared()[:2], 70, seed) for seed in (3, 3, 4))
    assert a == b
    assert a.layers[0].inside["gate"] != c.layers[0].inside["gate"]
    for kind in (a.layers[:2], a.layers[2:]):
        assert kind[0].inside["gate"] == kind[1].inside["gate"]
    assert [name for name, _ in a.sites()] == ["gaussian", "heavy-tailed"]
    gaussian, heavy = a.layers[0].inside["gate"], a.layers[2].inside["gate"]
    assert gaussian.kurtosis == pytest.approx(3, abs=0.1)
    assert gaussian.rms == pytest.approx(1, abs=0.02)
    assert (heavy.kurtosis or 0) > 10


def test_caps_bound_made_inputs_by_their_product() -> None:
    result = synthetic_ranges(compared(), 300)
    heavy = {p.gate: p for p in dict(result.sites())["heavy-tailed"]}
    free, situ, clamped = (heavy[repr(compared()[i])] for i in (0, 1, 3))
    assert free.bound is None
    assert free.product.amax > 1000
    for capped in (situ, clamped):
        assert capped.bound is not None
        assert 50 < capped.product.amax <= capped.bound * (1 + 1e-6)
    assert clamped.saturation["psi high"].share == pytest.approx(0.0011, rel=0.3)


def test_a_result_is_data() -> None:
    result = synthetic_ranges([GATES["swiglu"]], 3)
    again = msgspec.json.decode(msgspec.json.encode(result), type=Ranges)
    assert again == result
    assert again.legend == LEGEND


def test_every_gate_of_the_catalogue_can_be_measured() -> None:
    result = synthetic_ranges([gate(name) for name in GATE_NAMES], 4)
    assert [layer.own.gate for layer in result.layers] == 2 * [repr(gate(name)) for name in GATE_NAMES]
    for layer in result.layers:
        assert layer.own.product.count == 4 * 1024
        assert all(e.error is not None and e.token_snr_db for e in layer.own.effects)
        assert layer.own.bound is None or layer.own.product.amax <= layer.own.bound * (1 + 1e-6)
