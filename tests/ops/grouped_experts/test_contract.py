"""What grouped experts take, refuse, keep and leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorformer.errors import ConfigError, GateError, ShapeError
from tensorformer.gates import GATES, SCALARS
from tensorformer.ops.grouped_experts import grouped_experts, resolve
from tests.ops.grouped_experts.expert_laws import Case, assert_laws, call, draw, run

IMPLS = ["auto", "reference", "fast"]


pytestmark = pytest.mark.usefixtures("nothing_built")


def arguments(**changes: Any) -> dict[str, Any]:
    """Return keyword arguments that are good, but for ``changes``."""
    case = draw(6, 4, 2, 5, 3, dtype=torch.float32)
    names = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias")
    return {**dict(zip(names, case.operands, strict=True)), "gate": "swiglu", "indices": case.indices, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, 5)}, ShapeError, r"write \(tokens, d\), such as x.flatten\(0, -2\)"),
        ({"x": torch.zeros(6, 5).long()}, ShapeError, r"x is torch.int64: write .float\(\)"),
        ({"x": torch.zeros(6, 5).double()}, ShapeError, r"x is torch.float64 and gate_up torch.float32: write .to"),
        ({"gate_up": torch.zeros(5, 6)}, ShapeError, "stack the experts' weights"),
        ({"gate_up": torch.zeros(4, 6, 5)}, ShapeError, r"with 'swiglu', a gate, x and down make it \(4, 5, 6\)"),
        ({"gate": "relu2"}, ShapeError, r"gate_up has shape \(4, 5, 6\): with 'relu2', a function of one variable"),
        ({"down": torch.zeros(4, 3, 6)}, ShapeError, r"down has shape \(4, 3, 6\)"),
        ({"gate_up": torch.zeros(0, 5, 6), "down": torch.zeros(0, 3, 5)}, ShapeError, "hold no experts"),
        ({"gate_up_bias": torch.zeros(4, 5)}, ShapeError, r"gate_up_bias has shape \(4, 5\)"),
        ({"down_bias": torch.zeros(5)}, ShapeError, r"down_bias has shape \(5,\)"),
        ({"weights": torch.zeros(5, 2)}, ShapeError, r"write \(tokens, k\), here \(6, k\)"),
        ({"indices": torch.zeros(6, 3).long()}, ShapeError, r"indices has shape \(6, 3\) and weights \(6, 2\)"),
        ({"indices": torch.zeros(6, 2)}, ShapeError, r"indices is torch.float32: write .long\(\)"),
        ({"indices": torch.full((6, 2), 4)}, ShapeError, "indices goes from 4 to 4: write 0 to 3, one of 4 experts"),
        ({"indices": torch.full((6, 2), -1)}, ShapeError, "indices goes from -1 to -1"),
        ({"gate": "swigul"}, GateError, "did you mean 'swiglu'"),
        ({"gate": "situ"}, GateError, "needs beta"),
        ({"gate": GATES["situ"].bind(beta=torch.ones(4, 3), linear_beta=None)}, ShapeError, r"beta of shape \(4, 3\)"),
        ({"layout": "up_gat"}, ConfigError, "did you mean 'up_gate'"),
        ({"gate": "relu2", "layout": "up_gate"}, ConfigError, "which has one projection: leave layout out"),
        ({"impl": "fst"}, ConfigError, "did you mean 'fast'"),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    for impl in [changes["impl"]] if "impl" in changes else IMPLS:
        with pytest.raises(error, match=message) as caught:
            grouped_experts(**arguments(**{"impl": impl, **changes}))
        assert "\n" not in str(caught.value)


def test_there_is_no_capacity() -> None:
    with pytest.raises(TypeError, match="capacity"):
        grouped_experts(**arguments(capacity=1.25))


def test_what_runs() -> None:
    assert resolve(**arguments()) == "fast"
    assert resolve(**arguments(impl="reference")) == "reference"
    with pytest.raises(ConfigError):
        resolve(**arguments(impl="triton"))


# Sizes and memory


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_do(impl: str, tokens: int, top_k: int) -> None:
    y, dx, *rest = run(draw(tokens, 3, top_k, 5, 4), impl)
    assert y.shape == dx.shape == (tokens, 5)
    assert not any(t.any() for t in (y, dx, *rest))


def test_no_width() -> None:
    assert_laws(lambda case: run(case, "fast"), draw(7, 3, 2, 5, 0))


@given(st.sampled_from(["transposed", "every second", "all alike", "reversed"]), st.integers(0, 9))
def test_any_strides(kind: str, seed: int) -> None:
    case = draw(9, 5, 2, 7, 3, seed=seed)

    def moved(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if kind == "transposed":
            return t.mT.contiguous().mT
        if kind == "every second":
            wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype)
            wide[..., ::2] = t
            return wide[..., ::2]
        if kind == "all alike":
            return t[:1].expand_as(t)
        return t.flip(0)

    operands = [moved(t) for t in case.operands]
    indices = case.indices.T.contiguous().T if kind == "transposed" else case.indices
    dy = moved(case.dy)
    assert dy is not None
    found = []
    for dense in (False, True):
        leaves = [t if t is None else (t.contiguous() if dense else t).requires_grad_() for t in operands]
        y = call(leaves, Case((), indices, case.gate, case.layout, case.dy))
        grads = torch.autograd.grad(y, [t for t in leaves if t is not None], dy.contiguous() if dense else dy)
        found.append([y, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_sum_has_a_gradient_of_stride_zero() -> None:
    case = draw(9, 5, 2, 7, 3)
    found = []
    for impl in ("fast", "reference"):
        leaf = case.operands[1]
        assert leaf is not None
        leaf = leaf.detach().requires_grad_()
        call((case.operands[0], leaf, *case.operands[2:]), case, impl).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_gradients_lie_as_the_weights_do() -> None:
    case = draw(9, 5, 2, 7, 3)
    x, gate_up, down, weights, *_ = (t for t in case.operands if t is not None)
    down = down.mT.contiguous().mT.requires_grad_()  # as transformers keeps it
    y = grouped_experts(x, gate_up, down, "swiglu", case.indices, weights)
    (grad,) = torch.autograd.grad(y, down, case.dy)
    assert grad.stride() == down.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unwritten_memory_is_never_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(63, 16, 2, 7, 3, dtype=dtype)
    expected = run(case, "fast")
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(Tensor, "new_empty", lambda t, *a, **k: new_empty(t, *a, **k).fill_(torch.nan))
    found = run(case, "fast")
    monkeypatch.undo()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("halves", [1, 2])
def test_what_is_kept_for_backward(dtype: torch.dtype, halves: int) -> None:
    tokens, top_k, d, d_ff = 128, 4, 64, 32
    gate = "swiglu" if halves == 2 else "relu2"
    case = draw(tokens, 16, top_k, d, d_ff, gate, biases=False, halves=halves, dtype=dtype)
    x, gate_up, down, weights = (t.requires_grad_() for t in case.operands if t is not None)
    own = {t.untyped_storage().data_ptr() for t in (gate_up, down, weights, case.indices)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        grouped_experts(x, gate_up, down, gate, case.indices, weights)
    activations = sum(n for at, n in kept.items() if at not in own)
    item = x.element_size()
    assert activations == tokens * d * item + tokens * top_k * halves * d_ff * item
    assert activations + 16 * tokens * top_k <= 3 * tokens * top_k * (2 * d + 3 * d_ff) * item


# Values


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "weights", "dy"])
def test_a_poisoned_token_stays_alone(impl: str, poison: float, where: str) -> None:
    case = draw(63, 5, 2, 7, 3, dtype=torch.float32)
    clean = run(case, impl)
    operands, dy = [None if t is None else t.clone() for t in case.operands], case.dy.clone()
    target = dy if where == "dy" else operands[0 if where == "x" else 3]
    assert target is not None
    target[17, -1] = poison
    y, dx, _, _, d_weights, *_ = run(Case(tuple(operands), case.indices, case.gate, case.layout, dy), impl)
    others = torch.arange(63) != 17
    for found, expected in ((y, clean[0]), (dx, clean[1]), (d_weights, clean[4])):
        torch.testing.assert_close(found[others], expected[others])
    assert not (dx if where == "dy" else y)[17].isfinite().all()


def test_weights_of_zero_and_an_expert_nobody_chose() -> None:
    case = draw(9, 5, 2, 7, 3)
    few = Case(case.operands, case.indices % 3, case.gate, case.layout, case.dy)
    for i, grad in enumerate(run(few, "fast")[1:]):
        if i in (1, 2, 4, 5):
            assert not grad[3:].any()
            assert grad[:3].any()
    weights = case.operands[3]
    assert weights is not None
    assert not call((*case.operands[:3], torch.zeros_like(weights), *case.operands[4:]), few).any()


# dtypes


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("routed", [torch.float32, torch.bfloat16], ids=str)
def test_dtype_in_is_dtype_out(impl: str, dtype: torch.dtype, routed: torch.dtype) -> None:
    case = draw(9, 5, 2, 7, 3, dtype=dtype)
    given_ = [t for t in case.operands if t is not None]
    leaves = [(t.to(routed) if i == 3 else t).requires_grad_() for i, t in enumerate(given_)]
    y = call(leaves, case, impl)
    assert y.dtype == dtype
    for leaf, grad in zip(leaves, torch.autograd.grad(y, leaves, case.dy), strict=True):
        assert grad.dtype == leaf.dtype


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
def test_autocast(impl: str, indices: torch.dtype) -> None:
    case = draw(63, 5, 2, 17, 9, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in case.operands if t is not None]
    with torch.autocast("cpu", torch.bfloat16):
        y = call(leaves, Case((), case.indices.to(indices), case.gate, case.layout, case.dy), impl)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y, leaves, case.dy.bfloat16())
    small = [t if i == 3 else t.detach().bfloat16().requires_grad_() for i, t in enumerate(leaves)]
    alone = call(small, case, impl)
    assert torch.equal(y, alone)
    for grad, expected in zip(grads, torch.autograd.grad(alone, small, case.dy.bfloat16()), strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected.float())


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_leaves_float64_alone(impl: str) -> None:
    case = draw(9, 5, 2, 7, 3)
    plain = run(case, impl)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(case, impl)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


# Transforms, and tensors without data


def test_torch_func() -> None:
    case = draw(9, 5, 2, 7, 3)
    x, gate_up, down, weights, *_ = (t for t in case.operands if t is not None)

    def loss(x: Tensor, down: Tensor) -> Tensor:
        return grouped_experts(x, gate_up, down, "swiglu", case.indices, weights).square().sum()

    leaves = x.requires_grad_(), down.requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for found, exact in zip(torch.func.grad(loss, argnums=(0, 1))(*leaves), expected, strict=True):
        torch.testing.assert_close(found, exact)


def test_one_tensor_in_two_places() -> None:
    """With d = d_ff a function of one variable may have one matrix twice."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=draws, dtype=torch.float64)
    weight = torch.randn(2, 3, 3, generator=draws, dtype=torch.float64).requires_grad_()
    routing = torch.rand(4, 1, generator=draws, dtype=torch.float64)
    indices = torch.tensor([[0], [1], [1], [0]])

    def f(weight: Tensor) -> Tensor:
        return grouped_experts(x, weight, weight, SCALARS["tanh"], indices, routing, impl="fast")

    assert torch.autograd.gradcheck(f, weight)
    assert torch.autograd.gradgradcheck(f, weight)


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_tensors_without_data(where: str) -> None:
    case = draw(9, 5, 2, 7, 3, dtype=torch.float32)
    mode = FakeTensorMode()
    turn = (lambda t: t.to("meta")) if where == "meta" else mode.from_tensor
    leaves, indices = [turn(t).requires_grad_() for t in case.operands if t is not None], turn(case.indices)
    with mode if where == "fake" else torch.device("cpu"):
        y = call(leaves, Case((), indices, case.gate, case.layout, case.dy), "auto")
        assert y.shape == (9, 7)
        y.sum().backward()
        for leaf in leaves:
            assert leaf.grad is not None
            assert leaf.grad.shape == leaf.shape
