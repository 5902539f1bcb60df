"""Every scalar against 50 digits of its own formula: laws in float64, then tails and limits in every dtype."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.gates import SCALARS
from tests.gates.gate_laws import INF, SCALAR_NAMES, assert_matches_oracle, scalar, slope

TAILS = [-100.0, -20.0, -13.0, -9.0, -8.0, -5.0, -1.3, -1e-3, -0.0, 0.0, 1e-3, 0.7, 5.0, 9.0, 20.0, 100.0]
# Relative error of the value. bfloat16 and float16: half a unit in the last place, so one rounding, and no more than
# a hundredth of another.
VALUE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.01}
# In float32 the exponent of these is a rounded product as large as 85: 85·2⁻²⁴ and a little.
STEEP = {"gelu": 1.3e-5, "gelu_tanh": 1.3e-5}
# The derivative of a bounded function is s(1 − s): absolute, not relative, where it dies out on the right.
SLOPE = {
    torch.float64: (1e-13, 1e-14),
    torch.float32: (1e-5, 2.5e-6),
    torch.bfloat16: (2**-8 * 1.01, 2.5e-6),
    torch.float16: (2**-11 * 1.01, 2.5e-6),
}


def grid(dtype: torch.dtype) -> torch.Tensor:
    """The tails, the smallest and largest numbers there are, the infinities and NaN."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps * 2
    extremes = [subnormal, info.smallest_normal, info.max, INF]
    return torch.tensor([*TAILS, *extremes, *(-e for e in extremes), math.nan], dtype=dtype)


@pytest.mark.parametrize("dtype", VALUE, ids=str)
@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_tails_and_limits(name: str, dtype: torch.dtype) -> None:
    rtol = max(VALUE[dtype], STEEP.get(name, 0.0) if dtype == torch.float32 else 0.0)
    assert_matches_oracle(scalar(name), scalar(name), grid(dtype), rtol=rtol)


@pytest.mark.parametrize("dtype", SLOPE, ids=str)
@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_derivative_in_tails_and_limits(name: str, dtype: torch.dtype) -> None:
    f, (rtol, atol) = scalar(name), SLOPE[dtype]
    for of in (f.derivative, slope(f)):
        assert_matches_oracle(of, f, grid(dtype)[:-1], order=1, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_second_derivative_has_limits(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = grid(dtype)[:-1].requires_grad_()
        (first,) = torch.autograd.grad(scalar(name)(x).sum(), x, create_graph=True)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first[first.isfinite()].sum(), x, allow_unused=True)
            assert second is None or second.isfinite().all()


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
    assert_matches_oracle(f, f, x, rtol=rtol)
    # At a kink of a clip or a ReLU the side decides, and x + 3 or x·σ(x) may round to the other one.
    kinks = torch.tensor([3.0, *(float(v) for v in f.parameters.values() if v is not None)], dtype=torch.float64)
    smooth = x[((x.abs()[:, None] - kinks).abs() > 0.01).all(1)]
    assert_matches_oracle(f.derivative, f, smooth, order=1, rtol=rtol, atol=1e-14 * reach)
    assert_matches_oracle(slope(f), f, smooth, order=1, rtol=rtol, atol=1e-14 * reach)


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


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_declared_limits_are_where_the_formula_goes(name: str) -> None:
    f = scalar(name)
    for side in (-1.0, 1.0):
        limit, far = f.oracle(side * INF), f.oracle(side * 1e300)
        if mpmath.isinf(limit):
            assert abs(far) > 1e299, name
            assert mpmath.sign(far) == mpmath.sign(limit), name
        else:
            assert abs(far - limit) < 1e-45, name


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_gradcheck(name: str) -> None:
    x = torch.tensor([-6.2, -2.4, -1.1, -0.3, 0.2, 0.9, 2.1, 5.5, 8.1], dtype=torch.float64, requires_grad=True)
    given_ = SCALARS[name].needs
    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.7, 6.5)][: len(given_)]

    def f(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return SCALARS[name].bind(**dict(zip(given_, values, strict=True)))(x)

    assert torch.autograd.gradcheck(f, (x, *values))
    if name not in ("identity", "clip", "clip_plus_one"):  # piecewise linear: nothing left to differentiate
        assert torch.autograd.gradgradcheck(f, (x, *values))
    assert torch.autograd.gradcheck(scalar(name), x)


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


ACT2FN = {
    "identity": "linear", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid", "tanh": "tanh", "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh", "gelu_quick": "quick_gelu", "silu": "silu",
}  # fmt: skip


@pytest.mark.parametrize("name", ACT2FN)
def test_agrees_with_transformers(name: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-4, 4, 257)
    torch.testing.assert_close(SCALARS[name](x), activations.ACT2FN[ACT2FN[name]](x), rtol=2e-6, atol=2e-6)


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
    # The trapezium rule, which knows nothing of panels: exact for smooth functions, h² at a kink.
    t = torch.linspace(-14, 14, 280_001, dtype=torch.float64)
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    assert math.isclose(torch.trapezoid(f(t).square() * density, t).item(), f.second_moment, rel_tol=1e-7)


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
    assert f.degree == (1 if name == "identity" else None)
    assert "x" in f.latex


def test_broken_implementations_are_caught() -> None:
    """The checks above, on functions that are wrong by little: a check that passes these checks nothing."""
    x32, x64 = grid(torch.float32), torch.linspace(-4, 4, 33, dtype=torch.float64)
    silu, gelu = SCALARS["silu"], SCALARS["gelu"]

    def slope_off_by_a_hundredth(x: torch.Tensor) -> torch.Tensor:
        return 1.01 * silu.derivative(x)

    def erf_off_by_two_thousandths(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * torch.erfc(-x * 0.7071067811865476 * 1.002)

    def one_plus_erf(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))

    rtol, atol = SLOPE[torch.float32]
    broken = [
        lambda: assert_matches_oracle(slope_off_by_a_hundredth, silu, x32[:15], order=1, rtol=rtol, atol=atol),
        lambda: assert_matches_oracle(erf_off_by_two_thousandths, gelu, x64, rtol=VALUE[torch.float32]),
        lambda: assert_matches_oracle(SCALARS["gelu_tanh"], gelu, x64, rtol=VALUE[torch.float32]),
        lambda: assert_matches_oracle(SCALARS["gelu_quick"], gelu, x64, rtol=1e-3),
        lambda: assert_matches_oracle(one_plus_erf, gelu, x32[:15], rtol=STEEP["gelu"]),
        # torch's own: NaN at the infinities, and no tail.
        lambda: assert_matches_oracle(F.silu, silu, x32, rtol=VALUE[torch.float32]),
        lambda: assert_matches_oracle(slope(F.silu), silu, x32[:-1], order=1, rtol=rtol, atol=atol),
        lambda: assert_matches_oracle(F.gelu, gelu, x32[:15], rtol=STEEP["gelu"]),
    ]
    for check in broken:
        with pytest.raises(AssertionError, match=r"silu|gelu"):
            check()
