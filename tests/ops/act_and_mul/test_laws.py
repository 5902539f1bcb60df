"""Every gate on its halves against the formula in float64, and the broken implementations that this must catch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.gates import GATES, SCALARS, Gate
from tensorformer.ops.act_and_mul import act_and_mul, fast, reference
from tensorformer.ops.act_and_mul.check import Backward, Forward, violations
from tensorformer.ops.operands import LAYOUTS, halves
from tests.gates.gate_laws import GATE_NAMES, NUMBERS, SCALAR_NAMES, gate

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", GATE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_fast_obeys_the_laws(name: str, dtype: torch.dtype) -> None:
    assert violations(fast.forward, fast.backward, gate(name), dtype) == []


@pytest.mark.parametrize("name", GATE_NAMES)
def test_reference_obeys_the_laws(name: str) -> None:
    assert violations(reference.forward, reference.backward, gate(name), torch.bfloat16) == []


# Deliberately broken


def slope_one_percent_off(gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
    fast.backward(gate, g, u, dh, dg, du)
    if dg is not None:
        dg.mul_(1.01)


def erf_factor_off(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    wide = g.float()
    return (wide * 0.5 * torch.erfc(-0.7071067811865476 * 1.002 * wide) * u.float()).to(g.dtype)


def swapped(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    return fast.forward(gate, u, g)


def float16_between(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    return (gate.gate(g).half() * u.half()).to(g.dtype)


def last_odd_one_forgotten(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    h = fast.forward(gate, g, u)
    flat, even = h.view(-1), h.numel() // 2 * 2
    flat[even:] = torch.nan
    return h


def strides_ignored(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    rows = [torch.as_strided(x, (x.numel(),), (0 if 0 in x.stride() else 1,), x.storage_offset()) for x in (g, u)]
    return fast.forward(gate, *(x.clone().view(g.shape) for x in rows))


def gradient_strides_ignored(
    gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None
) -> None:
    fast.backward(gate, g, u, dh.as_strided((dh.numel(),), (min(1, *dh.stride()),)).view(dh.shape), dg, du)


def dg_where_only_du_is_wanted(
    gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None
) -> None:
    fast.backward(gate, g, u, dh, torch.empty_like(g) if dg is None else dg, du if dg is None else None)
    if dg is not None and du is not None:
        du.zero_()


def written_into(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    h = fast.forward(gate, g, u)
    if 0 not in u.stride():
        u.mul_(2)
    return h


def nan_at_infinity(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    return F.gelu(g) * u


def nan_dropped(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    return fast.forward(gate, g.nan_to_num(0.0), u)


FORWARDS = [erf_factor_off, swapped, float16_between, last_odd_one_forgotten, strides_ignored, written_into]
BACKWARDS = [slope_one_percent_off, gradient_strides_ignored, dg_where_only_du_is_wanted]


@pytest.mark.parametrize("forward", [*FORWARDS, nan_at_infinity, nan_dropped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broken_forward_is_caught(forward: Forward, dtype: torch.dtype) -> None:
    found = violations(forward, fast.backward, gate("geglu"), dtype)
    assert found
    assert all(not line.count("\n") for line in found)


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broken_backward_is_caught(backward: Backward, dtype: torch.dtype) -> None:
    assert violations(fast.forward, backward, gate("swiglu"), dtype)


def test_what_is_found_says_where() -> None:
    (first, *_) = violations(fast.forward, slope_one_percent_off, gate("swiglu"), torch.bfloat16)
    assert first.startswith("around zero, contiguous, (1,), float32: dg is ")
    assert " and should be " in first

    def fails(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
        raise RuntimeError("no such\nkernel")

    assert violations(fails, fast.backward, gate("glu"), torch.float32)[0].endswith("RuntimeError: no such")


# Tiles


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TILE", 60)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("name", "dtype"), [("swiglu", torch.float64), ("situ", torch.float16)], ids=str)
def test_tiles_change_nothing(name: str, dtype: torch.dtype) -> None:
    assert violations(fast.forward, fast.backward, gate(name), dtype) == []


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    limit=st.integers(1, 40),
    small=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_tiles_cover_everything_once(shape: list[int], limit: int, small: list[bool]) -> None:
    x = torch.zeros(shape)
    one = torch.ones([1 if s else n for s, n in zip(small, shape, strict=False)])
    for part, factor in fast.tiles(limit, (x, one)):
        assert part.numel() <= limit
        part += factor
    assert torch.equal(x, torch.ones(shape))


# Gradients of operands and parameters


def bound(name: str, values: tuple[Tensor, ...]) -> Gate:
    return GATES[name].bind(**dict(zip(GATES[name].needs, values, strict=True)))


@pytest.mark.parametrize(("name", "layout"), zip(GATE_NAMES, itertools.cycle([*LAYOUTS, None]), strict=False))
def test_gradcheck_with_tensor_parameters(name: str, layout: str | None) -> None:
    g = torch.tensor([[-3.1, -0.6, 0.4], [1.9, 8.3, -0.9]], dtype=torch.float64)
    u = torch.tensor([[0.7, -7.9, 2.2], [-1.4, 8.8, 0.3]], dtype=torch.float64)
    operands = [g, u]
    if layout:
        x = torch.empty(2, 6, dtype=torch.float64)
        for half, value in zip(halves(x, layout), (g, u), strict=True):
            half.copy_(value)
        operands = [x]
    # A number, one a channel, one a row: in turn.
    shapes = [(), (3,), (2, 1)]
    values = [torch.full(shapes[i % 3], NUMBERS[n], dtype=torch.float64) for i, n in enumerate(GATES[name].needs)]
    leaves = [t.requires_grad_() for t in (*operands, *values)]

    def f(*leaves: Tensor) -> Tensor:
        pair = leaves[: len(operands)]
        x = pair[0] if layout else (pair[0], pair[1])
        return act_and_mul(x, bound(name, leaves[len(operands) :]), layout=layout, impl="fast")

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("name", SCALAR_NAMES)
@pytest.mark.parametrize("learned", [False, True])
def test_any_scalar_on_either_side(name: str, learned: bool) -> None:
    needs = SCALARS[name].needs
    values = {n: torch.full((), v, dtype=torch.float64) for n, v in NUMBERS.items()} if learned else NUMBERS
    scalar = SCALARS[name].bind(**{n: values[n] for n in needs})
    x = (torch.randn(9, 14, dtype=torch.float64) * 4).requires_grad_()
    for pair in ((scalar, SCALARS["tanh"]), (SCALARS["tanh"], scalar), (scalar, scalar)):
        own = Gate("own", *pair, "here")
        results = []
        for impl in ("fast", "reference"):
            h = act_and_mul(x, own, layout="interleaved", impl=impl)
            results.append((h, *torch.autograd.grad(h, x, torch.cos(h.detach()))))
        for found, formula in zip(*results, strict=True):
            torch.testing.assert_close(found, formula, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 1, 5), (7, 1)], ids=str)
def test_parameters_get_their_gradient_in_float32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(3, 7, 10).to(dtype)
    beta = (torch.rand(shape) + 1).requires_grad_()
    limit = torch.tensor(2.0, requires_grad=True)
    dh = torch.randn(3, 7, 5).to(dtype)
    situ = GATES["situ"].bind(beta=beta, linear_beta=limit)
    h = act_and_mul(x, situ, layout="interleaved", impl="fast")
    found = torch.autograd.grad(h, [beta, limit], dh)
    exact = [p.detach().double().requires_grad_() for p in (beta, limit)]
    wide = GATES["situ"].bind(beta=exact[0], linear_beta=exact[1])(*halves(x.double(), "interleaved"))
    truth = torch.autograd.grad(wide, exact, dh.double())
    for a, b, p in zip(found, truth, (beta, limit), strict=True):
        assert (a.dtype, a.shape) == (p.dtype, p.shape)
        torch.testing.assert_close(a, b.float(), rtol=2e-5, atol=2e-5)


@given(
    rows=st.sampled_from([0, 1, 3, 7]),
    width=st.sampled_from([0, 1, 3, 63, 257]),
    layout=st.sampled_from(list(LAYOUTS)),
    name=st.sampled_from(GATE_NAMES),
    spread=st.sampled_from([0.1, 3.0, 20.0]),
)
def test_fast_is_the_formula(rows: int, width: int, layout: str, name: str, spread: float) -> None:
    x = (torch.randn(rows, 2 * width, dtype=torch.float64) * spread).requires_grad_()
    dh = torch.randn(rows, width, dtype=torch.float64)
    results = []
    for impl in ("reference", "fast"):
        h = act_and_mul(x, gate(name), layout=layout, impl=impl)
        results.append((h, *torch.autograd.grad(h, x, dh)))
    for formula, found in zip(*results, strict=True):
        torch.testing.assert_close(found, formula, rtol=1e-11, atol=1e-12)


# Oracles from elsewhere


def test_up_gate_is_the_layout_of_torch() -> None:
    x = torch.randn(5, 14, requires_grad=True)
    dh = torch.randn(5, 7)
    ours, theirs = act_and_mul(x, "glu", layout="up_gate", impl="fast"), F.glu(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(ours, x, dh), torch.autograd.grad(theirs, x, dh), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_interleaved_is_the_layout_of_gpt_oss() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    experts = SimpleNamespace(alpha=1.702, limit=7.0)
    x = (torch.randn(5, 14) * 6).requires_grad_()
    apply: Callable[..., Tensor] = modeling.GptOssExperts._apply_gate
    ours = act_and_mul(x, GATES["swiglu_oai"].bind(alpha=1.702, limit=7.0), layout="interleaved", impl="fast")
    theirs = apply(experts, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    dh = torch.randn(5, 7)
    for a, b in zip(torch.autograd.grad(ours, x, dh), torch.autograd.grad(theirs, x, dh), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["swiglu", "situ", "geglu"])
def test_bfloat16_is_rounded_once(name: str) -> None:
    g, u = (torch.randn(2, 20_000) * 3).bfloat16()
    best = gate(name)(g.double(), u.double()).bfloat16()
    once = (act_and_mul((g, u), gate(name), impl="fast") != best).double().mean()
    twice = (act_and_mul((g, u), gate(name), impl="reference") != best).double().mean()
    assert once < 1e-3
    assert twice > 0.1
