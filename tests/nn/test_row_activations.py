"""Activations over a row: against their authors' modules, by their invariances, and through a recipe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.activations import feed_forward_activation
from tensorformer.config.count import parameters
from tensorformer.config.row_activations import ROW_ACTIVATIONS, RowActivation
from tensorformer.errors import GateError
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.row_activations import NormedReLU2GLU, PolyNorm, SparseGEGLU, make_row_activation

SPARSITY = 0.95
NAMES = sorted(ROW_ACTIVATIONS)


def bound(name: str) -> RowActivation:
    return ROW_ACTIVATIONS[name].bind(**({"sparsity": SPARSITY} if ROW_ACTIVATIONS[name].needs else {}))


def made(name: str, d_ff: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    return make_row_activation(bound(name), d_ff).to(dtype)


def inputs(name: str, *shape: int) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for _ in range(2 if ROW_ACTIVATIONS[name].gated else 1)]


@pytest.mark.parametrize("name", NAMES)
@given(rows=st.integers(1, 4), width=st.sampled_from([1, 2, 7, 63, 257]), seed=st.integers(0, 99))
def test_a_row_does_not_see_its_neighbours(name: str, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    f, xs = made(name, width), inputs(name, rows, width)
    alone = torch.cat([f(*(x[i : i + 1] for x in xs)) for i in range(rows)])
    torch.testing.assert_close(f(*xs), alone, rtol=1e-12, atol=1e-13)
    strided = [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in xs]
    torch.testing.assert_close(f(*strided), f(*xs), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    torch.manual_seed(3)
    f, xs = made(name, 5), inputs(name, 2, 5)
    assert torch.autograd.gradcheck(f, [x.requires_grad_() for x in xs])
    assert torch.autograd.gradgradcheck(f, xs)


@given(scale=st.floats(0.1, 100.0))
def test_invariances(scale: float) -> None:
    torch.manual_seed(0)
    g, u = torch.randn(2, 3, 64, dtype=torch.float64) * 10
    f = PolyNorm().double()
    torch.testing.assert_close(f(g * scale), f(g), rtol=1e-4, atol=1e-4)  # up to the 1e-6 in its root
    sparse = SparseGEGLU(0.9)
    assert torch.equal(sparse(g * scale + scale, u) == 0, sparse(g, u) == 0)
    normed = NormedReLU2GLU(64).double()
    torch.testing.assert_close(normed(g * scale, u), normed(g, u), rtol=1e-5, atol=1e-5)


def test_sparsity_is_the_share_of_zeros() -> None:
    for share in (0.5, 0.8, 0.95):
        h = SparseGEGLU(share)(torch.randn(64, 4096) * 3 + 1, torch.ones(64, 4096))
        assert abs((h == 0).float().mean().item() - share) < 0.01


def test_polynorm_by_hand() -> None:
    f, x = PolyNorm().double(), torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    with torch.no_grad():
        f.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        f.bias.fill_(0.25)
    rms = [x.pow(2 * i).mean().add(1e-6).sqrt() for i in (1, 2, 3)]
    by_hand = 0.5 * x**3 / rms[2] - x**2 / rms[1] + 2 * x / rms[0] + 0.25
    torch.testing.assert_close(f(x), by_hand, rtol=1e-14, atol=0)


def test_gemma_3n_agrees() -> None:
    modeling = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    config = pytest.importorskip("transformers").Gemma3nTextConfig(
        hidden_size=8, intermediate_size=64, num_hidden_layers=1, activation_sparsity_pattern=[SPARSITY]
    )
    theirs = modeling.Gemma3nTextMLP(config, layer_idx=0)
    ours = feed_forward({"name": "geglu_tanh_sparse", "sparsity": SPARSITY}, 64, 8)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(20, 8) * 3
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_bitnet_agrees() -> None:
    modeling = pytest.importorskip("transformers.models.bitnet.modeling_bitnet")
    config = pytest.importorskip("transformers").BitNetConfig(
        hidden_size=8,
        intermediate_size=64,
        num_hidden_layers=1,
        hidden_act="relu2",
        rms_norm_eps=1e-6,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    theirs = modeling.BitNetMLP(config)
    nn.init.uniform_(theirs.ffn_sub_norm.weight)
    ours = feed_forward("relu2_glu_norm", 64, 8)
    renamed = {n.replace("ffn_sub_norm", "row.norm"): v for n, v in theirs.state_dict().items()}
    ours.load_state_dict(renamed)
    x = torch.randn(20, 8) * 3
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_not_taken_in_half_precision(name: str) -> None:
    torch.manual_seed(1)
    xs = [x * 40 for x in inputs(name, 4, 257)]
    exact = made(name, 257)(*xs)
    for dtype in (torch.bfloat16, torch.float16):
        low = [x.to(dtype) for x in xs]
        truth = made(name, 257)(*(x.double() for x in low))
        got = make_row_activation(bound(name), 257)(*low)
        assert got.dtype == dtype
        finite = truth.abs() < torch.finfo(dtype).max
        torch.testing.assert_close(got[finite].double(), truth[finite], rtol=2e-2, atol=2e-2)
    assert exact.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_second_moment(name: str) -> None:
    torch.manual_seed(2)
    xs = [torch.randn(400, 2048) for _ in range(2 if ROW_ACTIVATIONS[name].gated else 1)]
    measured = make_row_activation(bound(name), 2048)(*xs).square().mean().item()
    assert measured == pytest.approx(bound(name).second_moment, rel=0.05)


def feed_forward(gate: str | dict, d_ff: int, d_model: int) -> FeedForward:
    return FeedForward(schema.FeedForward(gate=gate, d_ff=d_ff), d_model)


LEARNED = [
    {"name": "swish_glu", "beta": schema.Learned(learned=1.0)},
    {
        "name": "xielu",
        "alpha_p": schema.Learned(learned=0.2),
        "alpha_n": schema.Learned(learned=-1.0),
        "beta": 0.5,
    },
]


@pytest.mark.parametrize("gate", [*NAMES, *LEARNED], ids=str)
def test_in_a_model_with_the_parameters_that_were_counted(gate: str | dict) -> None:
    if gate == "geglu_tanh_sparse":
        gate = {"name": "geglu_tanh_sparse", "sparsity": 0.5}
    config = schema.Model(
        d_model=16,
        n_layers=2,
        mixers={"a": schema.SoftmaxAttention(n_heads=2)},
        ffns={"f": schema.FeedForward(gate=gate, d_ff=24)},
        layers=(schema.Layer(mixer="a", ffn="f"),),
    )
    model = TensorTransformer(config)
    assert sum(p.numel() for p in model.parameters()) == parameters(config)
    model(torch.randint(256, (2, 9))).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for name, p in model.named_parameters():
        if "learned" in name or "row" in name:
            assert p.grad is not None
            assert p.grad.abs().sum() > 0, name


def test_a_learned_parameter_is_used() -> None:
    layer = feed_forward(LEARNED[0], 8, 4)
    fixed = feed_forward({"name": "swish_glu", "beta": 2.5}, 8, 4)
    fixed.load_state_dict({n: p for n, p in layer.state_dict().items() if "learned" not in n})
    x = torch.randn(3, 4)
    assert not torch.allclose(layer(x), fixed(x))
    with torch.no_grad():
        layer.get_parameter("learned.beta").fill_(2.5)
    torch.testing.assert_close(layer(x), fixed(x))


def test_errors_say_what_to_write() -> None:
    def activation(**table: object) -> object:
        return feed_forward_activation(schema.FeedForward(gate=table, d_ff=8))  # pyright: ignore

    with pytest.raises(GateError, match="needs sparsity, a number between 0 and 1, not None"):
        activation(name="geglu_tanh_sparse")
    with pytest.raises(GateError, match=r"needs sparsity, a number between 0 and 1, not 1\.0"):
        activation(name="geglu_tanh_sparse", sparsity=1.0)
    with pytest.raises(GateError, match="'polynorm' has no parameter 'eps'"):
        activation(name="polynorm", eps=1.0)
    with pytest.raises(GateError, match="did you mean 'polynorm'"):
        activation(name="polynrom")
    with pytest.raises(GateError, match="no parameter to learn"):
        activation(name="geglu_tanh_sparse", sparsity=schema.Learned(learned=0.5))


def test_a_wrong_deviation_is_caught() -> None:
    """f − 1 for f in the standard deviation, which Gemma's module must tell apart at a narrow row."""
    g, u = torch.randn(50, 8, dtype=torch.float64), torch.ones(50, 8, dtype=torch.float64)
    wrong = torch.relu(g - (g.mean(-1, keepdim=True) + SparseGEGLU(0.6).cutoff * g.std(-1, keepdim=True)))
    assert not torch.equal(wrong == 0, SparseGEGLU(0.6)(g, u) == 0)


def test_polynorm_of_large_rows_keeps_its_cube() -> None:
    x = torch.randn(4, 33, dtype=torch.float64)
    for size in (1e3, 1e8, 1e30):
        low = PolyNorm()((x * size).float())
        torch.testing.assert_close(low.double(), PolyNorm().double()((x * size).float().double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -1.0, float("nan")])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(GateError, match="write a share between 0 and 1"):
        SparseGEGLU(share)
