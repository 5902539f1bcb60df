"""Gates: what they compute, on any layout of memory, with gradients for everything that is a tensor."""

from __future__ import annotations

import copy
import itertools
import pickle

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.errors import GateError, ShapeError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar, activation
from tensorformer.testing.laws import assert_gradients
from tests.gates.gate_laws import GATE_NAMES, INF, NUMBERS, SCALAR_NAMES, gate, scalar


def by_hand(name: str, g: Tensor, u: Tensor) -> Tensor:
    """The formulas as their models' code has them, written without a look at the catalogue."""
    limit, alpha, beta, linear_beta = (NUMBERS[n] for n in ("limit", "alpha", "beta", "linear_beta"))
    match name:
        case "glu":
            return u / (1 + torch.exp(-g))
        case "bilinear":
            return torch.einsum("...,...->...", g, u)
        case "reglu":
            return torch.where(g > 0, g, torch.zeros_like(g)) * u
        case "geglu":
            return F.gelu(g) * u
        case "geglu_tanh":
            return F.gelu(g, approximate="tanh") * u
        case "swiglu":
            return g / (1 + torch.exp(-g)) * u
        case "situ":
            return beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
        case "swiglu_oai":
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            return (u + 1) * (g * torch.sigmoid(alpha * g))
        case "swiglu_clamped":
            return F.silu(torch.minimum(g, torch.tensor(limit))) * u.clamp(min=-limit, max=limit)
        case "swiglu_clamp_after":
            return F.silu(g).clamp(max=limit) * u.clamp(min=-limit, max=limit)
        case "gtu":
            return torch.tanh(u) * torch.sigmoid(g)
        case "swish_glu":
            return g * torch.sigmoid(beta * g) * u
        case "powlu":
            power = g.clamp(min=1e-30) ** (NUMBERS["m"] / (g.clamp(min=0).sqrt() + 1))
            return torch.where(g > 0, power, g) * torch.sigmoid(g) * u
        case "relu2_glu":
            return torch.relu(g).square() * u
        case "drelu":
            return torch.relu(g) * torch.relu(u)
        case "fatreglu":
            return torch.where(g >= NUMBERS["threshold"], g, 0.0) * u
        case "hard_sigmoid_glu":
            return F.hardsigmoid(g) * u
        case "hard_swish_glu":
            return F.hardswish(g) * u
        case "bilinear_clamped":
            return g.clamp(-limit, limit) * u.clamp(-limit, limit)
        case "square_glu":
            return g * g * u
        case "cube_glu":
            return g * g * g * u
    raise NotImplementedError(f"write {name!r} by hand as well")


@pytest.mark.parametrize("name", GATE_NAMES)
def test_formula(name: str) -> None:
    g, u = torch.randn(2, 4000, dtype=torch.float64) * 5
    torch.testing.assert_close(gate(name)(g, u), by_hand(name, g, u), rtol=1e-11, atol=1e-13)


def test_gpt_oss_experts_agree() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = pytest.importorskip("transformers").GptOssConfig(
        hidden_size=6, intermediate_size=10, num_local_experts=1, num_hidden_layers=1
    )
    experts = modeling.GptOssExperts(config)
    gate_up = torch.randn(50, 20) * 6
    g, u = gate_up[..., ::2], gate_up[..., 1::2]
    torch.testing.assert_close(gate("swiglu_oai")(g, u), experts._apply_gate(gate_up), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GATE_NAMES)
@pytest.mark.parametrize("size", [0, 1, 3, 7, 63, 257, 1368])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_layout_and_inputs_left_alone(name: str, size: int, dtype: torch.dtype) -> None:
    f = gate(name)
    both = torch.randn(3, size, 2, dtype=torch.float64).to(dtype)
    layouts = [
        both.unbind(-1),
        both.mT[:, 0, ::2].unbind(0)[:2],
        (both[0, :, 0].expand(4, size), both[:1, :, 1].expand(4, size)),
    ]
    for g, u in layouts:
        before = g.clone(), u.clone()
        h = f(g, u)
        assert h.dtype == dtype
        # A vector lane and the odd elements at the end may round differently: a few units in the last place.
        rtol, atol = 8 * torch.finfo(dtype).eps, 8 * torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(h, f(g.clone().contiguous(), u.clone().contiguous()), rtol=rtol, atol=atol)
        assert torch.equal(g, before[0])
        assert torch.equal(u, before[1])
        leaves = [t.detach().requires_grad_() for t in (g, u)]
        strided = torch.autograd.grad(f(*leaves).sum(), leaves)  # a gradient of stride 0
        dense = torch.autograd.grad(f(*leaves), leaves, torch.ones_like(h))
        for a, b in zip(strided, dense, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert torch.equal(g, before[0])
        assert torch.equal(u, before[1])


@pytest.mark.parametrize("name", GATE_NAMES)
def test_gradients_of_parameters_too(name: str) -> None:
    assert_gradients(gate(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_parameters_per_channel_get_gradients(dtype: torch.dtype) -> None:
    g, u = torch.randn(2, 64, 5).to(dtype)
    beta = torch.nn.Parameter(torch.rand(5) + 1)
    h = GATES["situ"].bind(beta=beta, linear_beta=None)(g, u)
    h.sum().backward()
    assert beta.grad is not None
    assert beta.grad.dtype == torch.float32
    exact = beta.detach().double().requires_grad_()
    by_formula = exact * torch.tanh(g.double() / exact) * torch.sigmoid(g.double()) * u.double()
    torch.testing.assert_close(h, by_formula.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(by_formula.sum(), exact)
    torch.testing.assert_close(beta.grad, grad.float(), rtol=1e-4, atol=1e-5)


def test_a_parameter_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"swish: a parameter of shape \(4, 3\) does not fit \(3,\)"):
        SCALARS["swish"].bind(beta=torch.ones(4, 3))(torch.ones(3))
    with pytest.raises(ShapeError, match=r"a parameter of shape \(4,\) does not fit \(3,\)"):
        SCALARS["swish"].bind(beta=torch.ones(4))(torch.ones(3))


def test_situ_is_bounded_and_becomes_swiglu() -> None:
    g, u = torch.randn(2, 5000, dtype=torch.float64) * 30
    assert GATES["situ"].bind(beta=4.0, linear_beta=25.0)(g, u).abs().max() <= 100.0
    g, u = g / 10, u / 10
    gaps = [
        (GATES["situ"].bind(beta=b, linear_beta=b)(g, u) - GATES["swiglu"](g, u)).abs().max().item()
        for b in (1e2, 1e3, 1e4, 1e5)
    ]
    # tanh(x/b)·b is x up to x³/3b²: two digits a step.
    assert all(later < earlier / 50 for earlier, later in itertools.pairwise(gaps))
    assert gaps[-1] < 1e-6


def test_situ_without_lambda() -> None:
    g, u = torch.randn(2, 100, dtype=torch.float64)
    f = GATES["situ"].bind(beta=4.0, linear_beta=None)
    assert torch.equal(f(g, u), f.gate(g) * u)
    assert f.value.degree == 1
    assert f.value.oracle([-INF, INF]) == [-mpmath.inf, mpmath.inf]
    assert repr(f) == "situ(beta=4.0, linear_beta=None)"
    assert repr(f.bind(beta=torch.ones(3), linear_beta=25)) == "situ(beta=tensor(3,), linear_beta=25.0)"
    assert f.bind(linear_beta=25.0).value.degree is None
    assert f.value.second_moment == pytest.approx(1.0)


def test_what_runs_in_eager_mode() -> None:
    """By the profiler: a dispatch mode would be noticed, and the check for infinities left out for it."""
    g, u = torch.randn(2, 8)
    for name, expected in (("bilinear", ["mul"]), ("swiglu", ["silu", "sum", "item", "mul"])):
        GATES[name](g, u)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            GATES[name](g, u)
        events = sorted((e for e in profile.events() or () if e.cpu_parent is None), key=lambda e: e.time_range.start)
        below = [c for e in events for c in ([e] if e.name.startswith("aten::") else e.cpu_children)]
        assert [e.name.removeprefix("aten::") for e in below] == expected


def test_meta_tensors_have_a_shape() -> None:
    g, u = torch.empty(2, 3, 5, device="meta")
    for name in GATE_NAMES:
        assert gate(name)(g, u).shape == (3, 5)


def test_autocast_changes_nothing() -> None:
    g, u = torch.randn(2, 64)
    for name in GATE_NAMES:
        plain = gate(name)(g, u)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(gate(name)(g, u), plain)


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_torch_func(name: str) -> None:
    f, x = scalar(name), torch.randn(5, 3, dtype=torch.float64)
    exact = f.derivative(x)
    vector = torch.func.vmap(torch.func.grad(lambda z: f(z)))(x.flatten()).reshape(x.shape)
    forward = torch.func.jvp(lambda z: f(z), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(vector, exact)
    torch.testing.assert_close(forward, exact)
    if f.needs and name != "situ_value":
        many = {n: torch.rand(4, 3, dtype=torch.float64) + 1 for n in f.needs}
        mapped = torch.func.vmap(lambda p: f.bind(**p)(x))(many)
        for i in range(4):
            torch.testing.assert_close(mapped[i], f.bind(**{n: v[i] for n, v in many.items()})(x))


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_forward_over_forward(name: str) -> None:
    f, x = scalar(name), torch.tensor(0.57, dtype=torch.float64)
    twice = torch.func.jacfwd(torch.func.jacfwd(lambda z: f(z)))(x)
    torch.testing.assert_close(twice.item(), float(f.oracle(0.57, order=2)), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", GATE_NAMES)
def test_what_is_declared(name: str) -> None:
    f = gate(name)
    assert isinstance(f, Gate)
    assert f.source
    assert f.degree == {"bilinear": 2, "square_glu": 3, "cube_glu": 4}.get(name)
    assert "g" in f.latex
    assert "u" in f.latex
    z1, z2 = torch.randn(2, 400_000, dtype=torch.float64)
    assert f(z1, z2).square().mean().item() == pytest.approx(f.second_moment, rel=0.05)


def test_latex() -> None:
    assert GATES["bilinear"].latex == "g u"
    assert GATES["swiglu"].latex == r"g \sigma\left(g\right) u"
    assert SCALARS["relu2"].latex == r"\left(\max\left(0, x\right)\right)^{2}"
    assert gate("swiglu_oai").latex.endswith(r"\left(\mathrm{clip}\left(u, - L, L\right) + 1\right)")


@pytest.mark.parametrize("name", GATE_NAMES)
def test_copies_and_pickles(name: str) -> None:
    g, u = torch.randn(2, 9)
    f = gate(name)
    expected = f(g, u)  # also builds the kernels, which must not be in the way
    assert torch.equal(copy.deepcopy(f)(g, u), expected)
    assert torch.equal(pickle.loads(pickle.dumps(f))(g, u), expected)


def test_a_copy_has_its_own_parameter() -> None:
    beta = torch.nn.Parameter(torch.tensor(1.5))
    twin = copy.deepcopy(SCALARS["swish"].bind(beta=beta))
    assert isinstance(twin.parameters["beta"], torch.nn.Parameter)
    assert twin.parameters["beta"] is not beta
    twin(torch.randn(4)).sum().backward()
    assert beta.grad is None
    assert twin.parameters["beta"].grad is not None


def test_activation() -> None:
    assert isinstance(activation("relu2"), Scalar)
    assert isinstance(activation("swiglu"), Gate)
    assert activation("situ", beta=4, linear_beta=None).parameters == {"beta": 4.0, "linear_beta": None}
    assert activation("swiglu_clamped", limit=10).parameters == {"limit": 10.0}


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        ("swigul", {}, "unknown activation 'swigul'; did you mean 'swiglu'"),
        ("swish", {}, "'swish' needs beta (>= 0): write beta=…"),
        ("situ", {"beta": 4.0}, "'situ' needs linear_beta (> 0 or None): write beta=…, linear_beta=…"),
        ("swiglu_oai", {}, "'swiglu_oai' needs alpha (> 0) and limit (> 0)"),
        ("silu", {"beta": 1.0}, "'silu' has no parameter 'beta'; it takes none"),
        ("situ", {"beta": 4.0, "linear_bet": 1.0}, "'situ' has no parameter 'linear_bet'; did you mean 'linear_beta'"),
        ("situ", {"beta": 0.0, "linear_beta": 1.0}, "beta must be a finite number > 0, not 0.0"),
        ("situ", {"beta": 1.0, "linear_beta": -1.0}, "linear_beta must be a finite number > 0 or None, not -1.0"),
        ("swish", {"beta": float("nan")}, "beta must be a finite number >= 0, not nan"),
        ("swish", {"beta": float("inf")}, "beta must be a finite number >= 0, not inf"),
        ("swish", {"beta": -0.5}, "beta must be a finite number >= 0, not -0.5"),
        ("swiglu_clamped", {"limit": None}, "limit must be a number > 0, not None"),
        ("swiglu_clamped", {"limit": True}, "limit must be a number > 0 or a tensor, not True"),
    ],
)
def test_errors_say_what_to_write(name: str, parameters: dict, text: str) -> None:
    with pytest.raises(GateError) as error:
        activation(name, **parameters)
    assert text in str(error.value)


def test_using_what_is_not_bound_is_an_error() -> None:
    x = torch.ones(3)
    for use in (
        lambda: SCALARS["swish"](x),
        lambda: SCALARS["swish"].second_moment,
        lambda: SCALARS["swish"].oracle(1.0),
        lambda: GATES["swiglu_oai"](x, x),
    ):
        with pytest.raises(GateError, match="needs"):
            use()
    with pytest.raises(GateError, match="did you mean 'gelu'"):
        SCALARS["gleu"]
    with pytest.raises(GateError, match="floating tensor"):
        SCALARS["swish"].bind(beta=torch.tensor(1))
