"""Every scalar against 50 digits of its own formula: laws in float64, then tails and limits in every dtype."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.gates import SCALARS, Scalar
from tensorformer.testing.inputs import points
from tensorformer.testing.laws import assert_laws, assert_slope, assert_value, slope_of
from tests.gates.gate_laws import INF, SCALAR_NAMES, assert_matches_oracle, gate, scalar


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_laws(name: str) -> None:
    assert_laws(SCALARS[name])


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_second_derivative_is_never_nan(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = points(dtype)[:-1].requires_grad_()
        (first,) = torch.autograd.grad(scalar(name)(x).sum(), x, create_graph=True)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first, x, torch.ones_like(first), allow_unused=True)
            assert second is None or not second.isnan().any()


@pytest.mark.parametrize("name", SCALAR_NAMES)
@given(data=st.data())
def test_laws_in_float64(name: str, data: st.DataObject) -> None:
    numbers = st.floats(0.05, 50.0)
    f = SCALARS[name].bind(**{n: data.draw(numbers, label=n) for n in SCALARS[name].needs})
    x = torch.tensor(
        data.draw(st.lists(st.floats(-40.0, 40.0), min_size=1, max_size=4), label="x"), dtype=torch.float64
    )
    # The argument of a sigmoid or an exponential is a rounded number: its error grows with its size.
    reach = 1 + max([float(v) for v in f.parameters.values() if v is not None], default=1.0) * 40
    # exp(−x²/2) and the cubic in the tanh form: up to 4,600 in the exponent, where the value itself underflows.
    rtol = 4e-16 * (reach if f.parameters else 3000)
    assert_value(f, f, x)
    # At a kink of a clip or a ReLU the side decides, and x + 3 or x·σ(x) may round to the other one.
    kinks = torch.tensor([3.0, *(float(v) for v in f.parameters.values() if v is not None)], dtype=torch.float64)
    smooth = x[((x.abs()[:, None] - kinks).abs() > 0.01).all(1)]
    assert_matches_oracle(f.derivative, f, smooth, order=1, rtol=rtol, atol=1e-14 * reach)
    assert_matches_oracle(slope_of(f), f, smooth, order=1, rtol=rtol, atol=1e-14 * reach)


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_declared_derivative_is_the_numerical_one(name: str) -> None:
    """``fdiff`` is written by hand: 50-digit differences of the value do not know it."""
    f = scalar(name)
    for x in (-4.1, -1.3, -0.2, 0.4, 2.2, 6.1, 8.3):
        with mpmath.workdps(60):
            # The oracle takes floats, so the step is one: exact in binary, and the points are as well.
            h = mpmath.mpf(2) ** -20
            exact = f.oracle(x, digits=50, order=1)
            near = [f.oracle(x + float(k * h), digits=50) for k in (-2, -1, 1, 2)]
            numerical = (near[0] - 8 * near[1] + 8 * near[2] - near[3]) / (12 * h)
            assert abs(numerical - exact) < mpmath.mpf(10) ** -20, (name, x)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
        ("hard_swish", F.hardswish),
        ("relu", F.relu),
        ("sigmoid", torch.sigmoid),
        ("tanh", torch.tanh),
    ],
)
def test_agrees_with_torch_where_torch_is_right(name: str, reference) -> None:
    x = torch.linspace(-2.9, 2.9, 201, dtype=torch.float64)
    torch.testing.assert_close(SCALARS[name](x), reference(x), rtol=1e-12, atol=1e-15)


def test_every_activation_of_transformers_is_here() -> None:
    """By its own name or an alias; what takes a parameter, with the value it has there."""
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-4, 4, 257)
    special = {
        "swish": ("silu", {}),  # there the name of SiLU; here of Swish(β)
        "elu": ("elu", {"alpha": 1.0}),
        "leaky_relu": ("leaky_relu", {"negative_slope": 0.01}),
    }
    absent = {"prelu", "sqrtsoftplus"}  # a learned module of its own; a router's score
    for name in sorted(activations.ACT2FN.keys() - absent):
        ours, parameters = special.get(name, (name, {}))
        module = activations.ACT2FN[name]
        if name == "xielu":
            module = module.float()
            parameters = {
                "alpha_p": module.alpha_p.item(),
                "alpha_n": module.alpha_n.item(),
                "beta": module.beta.item(),
            }
        theirs = module(x).detach()
        ours_ = SCALARS[ours].bind(**parameters)(x)
        torch.testing.assert_close(ours_, theirs, rtol=3e-6, atol=3e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_known_distances_between_the_three_gelus() -> None:
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    exact = SCALARS["gelu"](x)
    for name, distance, where in (("gelu_tanh", 4.73e-4, 2.70), ("gelu_quick", 2.03e-2, 2.27)):
        gap = (exact - SCALARS[name](x)).abs()
        assert abs(gap.max().item() - distance) < 0.005 * distance
        assert abs(abs(x[gap.argmax()].item()) - where) < 0.01


def test_known_minimum_of_silu() -> None:
    x = torch.linspace(-2, 0, 2_000_001, dtype=torch.float64)
    y = SCALARS["silu"](x)
    assert abs(y.min().item() + 0.2784645) < 1e-7
    assert abs(x[y.argmin()].item() + 1.2784645) < 1e-5


def test_swish_goes_from_half_of_x_to_silu() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    zero = SCALARS["swish"].bind(beta=0.0)
    assert torch.equal(zero(x), x / 2)
    ends = torch.tensor([-INF, INF])
    assert torch.equal(zero(ends), ends)
    assert zero.oracle(ends) == [-mpmath.inf, mpmath.inf]
    assert (zero.degree, SCALARS["swish"].bind(beta=1.0).degree) == (1, None)
    assert torch.equal(SCALARS["swish"].bind(beta=1.0)(x), x * torch.sigmoid(x))
    assert torch.equal(SCALARS["swish"].bind(beta=1.702)(x), SCALARS["gelu_quick"](x))


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_second_moment(name: str) -> None:
    f = scalar(name)
    z = torch.randn(2_000_000, dtype=torch.float64)
    square = f(z).square()
    deviation = 5 * square.std().item() / math.sqrt(z.numel())
    assert abs(square.mean().item() - f.second_moment) < deviation
    # The trapezium rule, which knows nothing of panels: exact for smooth functions, h² at a kink, h at a jump.
    tolerance = 1e-3 if name == "fatrelu" else 1e-7
    t = torch.linspace(-14, 14, 280_001, dtype=torch.float64)
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    assert math.isclose(torch.trapezoid(f(t).square() * density, t).item(), f.second_moment, rel_tol=tolerance)


def test_second_moments_in_closed_form() -> None:
    for name, exact in (("identity", 1.0), ("relu", 0.5), ("relu2", 1.5)):
        assert math.isclose(SCALARS[name].second_moment, exact, rel_tol=1e-11)
    # A clip at L: 1 − 2(Lφ(L) + (1 − L²)Q(L)), Q the upper tail; a kink off every grid.
    limit = 1.2345
    density, tail = math.exp(-(limit**2) / 2) / math.sqrt(2 * math.pi), math.erfc(limit / math.sqrt(2)) / 2
    exact = 1 - 2 * (limit * density + (1 - limit**2) * tail)
    assert math.isclose(SCALARS["clip"].bind(limit=limit).second_moment, exact, rel_tol=1e-9)


def test_second_moment_does_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        assert SCALARS["softcap"].bind(c=1e6).second_moment == pytest.approx(1.0)


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_what_is_declared(name: str) -> None:
    f = SCALARS[name]
    assert f.name == name
    assert "arXiv:" in f.source or "config.json" in f.source
    assert f.degree == {"identity": 1, "square": 2, "cube": 3}.get(name)
    assert "x" in f.latex


def test_broken_implementations_are_caught() -> None:
    """The checks above, on functions that are wrong by little: a check that passes these checks nothing."""
    x32, x64 = points(torch.float32), torch.linspace(-4, 4, 33, dtype=torch.float64)
    silu, gelu = SCALARS["silu"], SCALARS["gelu"]

    def slope_off_by_a_hundredth(x: torch.Tensor) -> torch.Tensor:
        return 1.01 * silu.derivative(x)

    def erf_off_by_two_thousandths(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * torch.erfc(-x * 0.7071067811865476 * 1.002)

    def one_plus_erf(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))

    def in_float16(x: torch.Tensor) -> torch.Tensor:
        return silu(x.half()).to(x.dtype)

    broken = [
        lambda: assert_slope(slope_off_by_a_hundredth, silu, x32[:15]),
        lambda: assert_value(erf_off_by_two_thousandths, gelu, x64),
        lambda: assert_value(erf_off_by_two_thousandths, gelu, x64.float()),
        lambda: assert_value(SCALARS["gelu_tanh"], gelu, x64),
        lambda: assert_value(SCALARS["gelu_quick"], gelu, x64),
        lambda: assert_value(one_plus_erf, gelu, x32[:15]),
        lambda: assert_value(in_float16, silu, x32),
        # torch's own: NaN at the infinities, and no tail.
        lambda: assert_value(F.silu, silu, x32),
        lambda: assert_slope(slope_of(F.silu), silu, x32[:-1]),
        lambda: assert_value(F.gelu, gelu, x32[:15]),
        # Limits that are not the formula's.
        lambda: assert_laws(Scalar("silu", "x*sigmoid(x)", ("0", "1"), "")),
    ]
    for check in broken:
        with pytest.raises(AssertionError, match=r"silu|gelu"):
            check()


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_shape(name: str) -> None:
    """Range and smoothness against the values themselves."""
    f = scalar(name)
    low, high = f.image
    x = torch.cat([torch.linspace(-30, 30, 60_001, dtype=torch.float64), torch.logspace(1.5, 6, 500).double()])
    y = torch.cat([f(x), f(-x)])
    assert y.min() >= low - 1e-12
    assert y.max() <= high + 1e-12
    for bound in (low, high):
        assert math.isinf(bound) or (y - bound).abs().min() < 1e-3 * (1 + abs(bound))
    near = torch.linspace(-12, 12, 2_000_003, dtype=torch.float64)
    jumps = f(near).diff().abs().max().item() > 1e-2
    bends = f.derivative(near).diff().abs().max().item() > 5e-3
    if name != "xielu":  # its jump, of 2e-6 at 0, is its published formula's, and too small to see here
        assert (f.smoothness == -1) == jumps
        assert (f.smoothness in (-1, 0)) == bends


def test_smoothness_and_cost() -> None:
    assert [SCALARS[n].smoothness for n in ("relu", "relu2", "silu", "cube")] == [0, 1, None, None]
    assert scalar("fatrelu").smoothness == scalar("xielu").smoothness == -1
    assert SCALARS["silu"].cost == {"add": 1, "div": 1, "exp": 1, "mul": 1}
    assert SCALARS["relu2"].cost == {"max": 1, "mul": 1}
    assert gate("bilinear").cost == {"mul": 1}
    assert gate("swiglu_oai").cost == {"add": 2, "div": 1, "exp": 1, "max": 1, "min": 2, "mul": 3}
