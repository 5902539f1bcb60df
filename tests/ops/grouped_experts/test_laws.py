"""Grouped experts against the plain loop in float64, and the broken implementations that this must catch."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.examples import example
from tensorformer.ops.grouped_experts import fast, grouped_experts, groups, products
from tensorformer.ops.operands import LAYOUTS
from tests.ops.grouped_experts.expert_laws import Case, assert_laws, draw, run

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def run_fast(case: Case) -> list[Tensor]:
    return run(case, "fast")


@given(
    tokens=st.sampled_from([0, 1, 2, 3, 7, 63, 257]),
    experts=st.sampled_from([1, 2, 3, 7, 33]),
    top_k=st.integers(1, 7),
    d=st.sampled_from([1, 3, 7, 16]),
    d_ff=st.sampled_from([1, 3, 8, 63]),
    layout=st.sampled_from(list(LAYOUTS)),
    biases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fast_is_the_loop(
    tokens: int, experts: int, top_k: int, d: int, d_ff: int, layout: str, biases: bool, seed: int
) -> None:
    case = draw(tokens, experts, min(top_k, experts), d, d_ff, layout=layout, biases=biases, seed=seed)
    assert_laws(run_fast, case)


@given(experts=st.sampled_from([1, 3, 7]), top_k=st.integers(1, 9), seed=st.integers(0, 99))
def test_an_expert_may_be_named_twice(experts: int, top_k: int, seed: int) -> None:
    case = draw(11, experts, 1, 5, 3, seed=seed)
    indices = torch.randint(experts, (11, top_k), generator=torch.Generator().manual_seed(seed))
    x, gate_up, down, _, *biases = case.operands
    weights = torch.rand(11, top_k, dtype=torch.float64)
    assert_laws(run_fast, Case((x, gate_up, down, weights, *biases), indices, "swiglu", "gate_up", case.dy))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_every_dtype(dtype: torch.dtype, biases: bool) -> None:
    for sizes in ((63, 5, 2, 33, 17), (257, 16, 4, 64, 32), (1, 8, 8, 31, 7)):
        assert_laws(run_fast, draw(*sizes, example(GATES["situ"]), biases=biases, dtype=dtype))


@pytest.mark.parametrize("name", ["bilinear", "geglu", "swiglu_oai", "reglu", "swiglu_clamp_after"])
def test_gates(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_laws(run_fast, draw(31, 5, 3, 17, 9, example(GATES[name]), layout="interleaved", dtype=dtype))


@pytest.mark.parametrize("name", ["relu2", "gelu", "xielu", "identity"])
def test_two_matrix_experts(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_laws(run_fast, draw(31, 5, 3, 17, 9, example(SCALARS[name]), halves=1, dtype=dtype))


@pytest.mark.parametrize("elements", [1, 150, 10**6])
def test_tiles_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TILE", elements)
    assert_laws(run_fast, draw(63, 9, 3, 7, 5))


def test_all_tokens_on_one_expert_and_all_on_all() -> None:
    case = draw(63, 5, 1, 7, 3)
    for e in range(5):
        assert_laws(run_fast, Case(case.operands, torch.full((63, 1), e), case.gate, case.layout, case.dy))
    assert_laws(run_fast, draw(63, 5, 5, 7, 3))


@given(seed=st.integers(0, 99), impl=st.sampled_from(["fast", "reference"]))
def test_experts_in_another_order_are_the_same_experts(seed: int, impl: str) -> None:
    case = draw(33, 7, 3, 5, 4, seed=seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    x, gate_up, down, weights, a, b = (t for t in case.operands if t is not None)
    moved = (x, gate_up[order], down[order], weights, a[order], b[order])
    there = run(case, impl)
    back = run(Case(moved, order.argsort()[case.indices], case.gate, case.layout, case.dy), impl)
    for i, (one, other) in enumerate(zip(there, back, strict=True)):
        torch.testing.assert_close(one[order] if i in (2, 3, 5, 6) else one, other, rtol=1e-12, atol=1e-12)


# Gradients


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("gate", ["swiglu", "relu2", "swish_glu"])
def test_gradcheck(impl: str, gate: str) -> None:
    halves = 1 if gate == "relu2" else 2
    case = draw(3, 3, 2, 2, 2, halves=halves)
    parameters = [torch.rand(3, 1, 2, dtype=torch.float64) + 1] if gate == "swish_glu" else []

    def f(*leaves: Tensor) -> Tensor:
        x, gate_up, down, weights, a, b, *rest = leaves
        bound: Gate | Scalar = GATES["swish_glu"].bind(beta=rest[0]) if rest else _named(gate)
        return grouped_experts(x, gate_up, down, bound, case.indices, weights, a, b, impl=impl)

    leaves = [t.requires_grad_() for t in (*case.operands, *parameters) if t is not None]
    assert torch.autograd.gradcheck(f, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, leaves)


def _named(name: str) -> Gate | Scalar:
    return GATES[name] if name in GATES else SCALARS[name]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (1, 1, 3), (5, 1, 1), (5, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_parameters_get_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = draw(63, 5, 2, 7, 3, biases=False, dtype=dtype)

    def gradient(beta: Tensor, wide: torch.dtype, impl: str) -> Tensor:
        beta, tried = beta.to(wide).requires_grad_(), case.to(wide)
        x, gate_up, down, weights, *_ = (t for t in tried.operands if t is not None)
        gate = GATES["situ"].bind(beta=beta, linear_beta=2.0)
        y = grouped_experts(x, gate_up, down, gate, tried.indices, weights, impl=impl)
        return torch.autograd.grad(y, beta, tried.dy)[0]

    beta = (torch.rand(shape) + 1).to(dtype)
    found, usual, truth = (
        gradient(beta, dtype, "fast"),
        gradient(beta, dtype, "reference"),
        gradient(beta, torch.float64, "reference"),
    )
    assert found.dtype == dtype
    # Of a sum of positive and negative numbers, their size counts.
    size = gradient(beta.expand(5, 1, 3).clone(), torch.float64, "reference").abs().sum()
    error, own = ((t.double() - truth).abs().max() for t in (found, usual))
    assert error <= 2 * (own + torch.finfo(dtype).eps * size)


@pytest.mark.parametrize("wanted", range(6))
def test_each_gradient_alone(wanted: int) -> None:
    case = draw(31, 5, 2, 7, 3)
    truth = run(case, "reference")[1 + wanted]
    leaves = [t.requires_grad_(i == wanted) for i, t in enumerate(case.operands) if t is not None]
    x, gate_up, down, weights, a, b = leaves
    y = grouped_experts(x, gate_up, down, case.gate, case.indices, weights, a, b, impl="fast")
    y.backward(case.dy)
    for i, leaf in enumerate(leaves):
        if i != wanted:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, truth, rtol=1e-12, atol=1e-12)


# Deliberately broken


def tokens_tiled(case: Case) -> list[Tensor]:
    """The popular mistake: token ids repeated as a whole, where each should be repeated in its place."""
    sort = groups.group

    def broken(indices: Tensor, experts: int, width: int) -> groups.Groups:
        found = sort(indices, experts, width)
        return found._replace(token=found.order % len(indices))

    with patch("tensorformer.ops.grouped_experts.fast.group", broken):
        return run(case, "fast")


def last_row_forgotten(case: Case) -> list[Tensor]:
    def broken(tile: groups.Tile, rows: Tensor, weights: Tensor, out: Tensor, biases: Tensor | None = None) -> Tensor:
        products.products(tile, rows, weights, out, biases)
        out[-1] = 0
        return out

    with patch.object(fast, "products", broken):
        return run(case, "fast")


def idle_experts_unwritten(case: Case) -> list[Tensor]:
    sort = groups.group

    def broken(indices: Tensor, experts: int, width: int) -> groups.Groups:
        return sort(indices, experts, width)._replace(counts=(1,) * experts)

    with (
        patch("tensorformer.ops.grouped_experts.fast.group", broken),
        patch.object(fast, "place", lambda t: torch.full_like(t, torch.nan)),
    ):
        return run(case, "fast")


def down_bias_not_weighted(case: Case) -> list[Tensor]:
    weights, bias = case.operands[3], case.operands[5]
    assert weights is not None
    assert bias is not None
    y, *grads = run(case, "fast")
    chosen = bias[case.indices]
    return [y + chosen.sum(1) - (weights[..., None] * chosen).sum(1), *grads]


def halves_swapped(case: Case) -> list[Tensor]:
    return run(Case(case.operands, case.indices, case.gate, "up_gate", case.dy), "fast")


def float16_inside(case: Case) -> list[Tensor]:
    return [t.to(case.dy.dtype) for t in run(case.to(torch.float16), "fast")]


def gradient_one_percent_off(case: Case) -> list[Tensor]:
    y, dx, *grads = run(case, "fast")
    return [y, dx * 1.01, *grads]


BROKEN = [
    tokens_tiled,
    last_row_forgotten,
    idle_experts_unwritten,
    down_bias_not_weighted,
    halves_swapped,
    float16_inside,
    gradient_one_percent_off,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_broken_implementations_are_caught(broken: Callable[[Case], list[Tensor]], dtype: torch.dtype) -> None:
    case = draw(7, 9, 2, 5, 3, dtype=dtype)
    assert len(case.indices.unique()) < 9
    assert_laws(run_fast, case)
    with pytest.raises(AssertionError):
        assert_laws(broken, case)
