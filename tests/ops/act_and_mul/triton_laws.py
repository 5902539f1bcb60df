"""The laws of the Triton kernels, under Triton's interpreter: test_triton.py runs this file in its own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.ops import triton_kernel
from tensorformer.ops.act_and_mul import triton
from tensorformer.ops.triton_kernel import gate_text
from tests.ops.interpreted import assert_within_budget, far_apart

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
Implementation = tuple[Callable[..., Tensor], Callable[..., None]]
OURS: Implementation = (triton.forward, triton.backward)


def operands(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Draw g, u and dh of unlike spreads, with tails of both signs."""
    draws = torch.Generator().manual_seed(seed)
    g, u, dh = torch.randn(3, *shape, generator=draws)
    return [(t * s + c).to(dtype) for t, s, c in ((g, 4.0, 0.3), (u, 5.0, -0.2), (dh, 1.0, 0.1))]


def formula(gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> list[Tensor]:
    """Return h, dg and du by the gate itself and autograd."""
    g, u = g.detach().clone().requires_grad_(), u.detach().clone().requires_grad_()
    h = gate(g, u)
    return [h.detach(), *torch.autograd.grad(h, (g, u), dh)]


def run(implementation: Implementation, gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> list[Tensor]:
    """Return h, dg and du; the gradients are written into the halves of one poisoned tensor, which must hold."""
    forward, backward = implementation
    kept = [t.clone() for t in (g, u, dh)]
    h = forward(gate, g, u)
    around = torch.full((*g.shape[:-1], 2 * g.shape[-1] + 3), NAN, dtype=g.dtype)
    dg, du = around[..., 1 : g.shape[-1] + 1], around[..., g.shape[-1] + 2 : -1]
    backward(gate, g, u, dh, dg, du)
    assert around[..., [0, g.shape[-1] + 1, -1]].isnan().all()
    torch.testing.assert_close([g, u, dh], kept, rtol=0, atol=0, equal_nan=True)
    assert h.is_contiguous()
    return [h, dg.clone(), du.clone()]


def assert_laws(implementation: Implementation, gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> None:
    truths = formula(gate, g.double(), u.double(), dh.double())
    references = formula(gate, g, u, dh)
    for what, found, reference, truth in zip(
        ("h", "dg", "du"), run(implementation, gate, g, u, dh), references, truths, strict=True
    ):
        assert_within_budget(found, reference, truth, f"{gate} {what} {g.dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(GATES))
def test_every_gate(name: str, dtype: torch.dtype) -> None:
    # bfloat16 is cut off, not rounded, by this interpreter: within the budget all the same.
    gate = example(GATES[name])
    assert triton.why_not(gate, dtype, CPU) is None
    assert_laws(OURS, gate, *operands(7, 53, dtype=dtype))


@pytest.mark.parametrize("columns", [1, 3, 7, 63, 257, 1368])
def test_odd_sizes(columns: int) -> None:
    for rows in (1, 3, 65):
        assert_laws(OURS, GATES["swiglu"], *operands(rows, columns, seed=columns))


def _halves(t: list[Tensor]) -> list[Tensor]:
    joined = torch.cat(t, -1)
    return list(joined.tensor_split(3, -1))


def _interleaved(t: list[Tensor]) -> list[Tensor]:
    joined = torch.stack(t, -1).flatten(-2)
    return [joined[..., i::3] for i in range(3)]


def _permuted(t: list[Tensor]) -> list[Tensor]:
    last = t[0].dim() - 1
    return [x.movedim(0, -1).contiguous().movedim(-1, 0) if i else x for i, x in enumerate(t)] if last else t


def _scattered(t: list[Tensor]) -> list[Tensor]:
    wide = [torch.full([2 * n + 1 for n in x.shape], NAN) for x in t]
    views = [w[tuple(slice(1, None, 2) for _ in w.shape)] for w in wide]
    for view, x in zip(views, t, strict=True):
        view.copy_(x)
    return views


def _constant_gradient(t: list[Tensor]) -> list[Tensor]:
    return [*t[:2], torch.tensor(0.7).expand(t[0].shape)]


def _one_row(t: list[Tensor]) -> list[Tensor]:
    return [x[:1].expand(x.shape) for x in t]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    laid=st.sampled_from([list, _halves, _interleaved, _permuted, _scattered, _constant_gradient, _one_row]),
    name=st.sampled_from(["swiglu", "swiglu_oai", "bilinear"]),
)
def test_any_shape_and_strides(shape: list[int], laid: Callable[[list[Tensor]], list[Tensor]], name: str) -> None:
    assert_laws(OURS, example(GATES[name]), *laid(operands(*shape)))


def test_gradients_of_any_strides() -> None:
    g, u, dh = operands(3, 4, 5)
    _, dg, du = formula(GATES["swiglu"], g, u, dh)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        into = [torch.full([(3, 4, 5)[i] for i in order], NAN).permute(*(order.index(i) for i in range(3)))]
        into.append(torch.full((3, 4, 11), NAN)[..., 1::2])
        triton.backward(GATES["swiglu"], g, u, dh, *into)
        torch.testing.assert_close(into, [dg, du], rtol=1e-5, atol=1e-6)


def test_one_gradient_alone() -> None:
    g, u, dh = operands(3, 7)
    _, dg, du = formula(GATES["geglu"], g, u, dh)
    alone = torch.full_like(g, NAN)
    triton.backward(GATES["geglu"], g, u, dh, alone, None)
    torch.testing.assert_close(alone, dg)
    triton.backward(GATES["geglu"], g, u, dh, None, alone)
    torch.testing.assert_close(alone, du)
    triton.backward(GATES["geglu"], g, u, dh, None, None)
    torch.testing.assert_close(alone, du)


def test_the_output_is_written_everywhere_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    g, u, _ = operands(5, 257)
    around = torch.full((5 * 257 + 64,), NAN)
    monkeypatch.setattr(triton.torch, "empty", lambda shape, **_: around[32:-32].view(shape))
    h = triton.forward(GATES["swiglu"], g, u)
    monkeypatch.undo()
    torch.testing.assert_close(h, GATES["swiglu"](g, u))
    assert around[:32].isnan().all()
    assert around[-32:].isnan().all()


@pytest.mark.parametrize("name", sorted(GATES))
def test_far_out_and_nan(name: str) -> None:
    gate = example(GATES[name])
    far = torch.tensor([-INF, -3e38, -1e4, -100.0, -9.0, -0.0, 0.0, 1e-30, 9.0, 100.0, 1e4, 3e38, INF, NAN])
    g, u = (t.contiguous() for t in torch.meshgrid(far, far, indexing="ij"))
    h, dg, du = run(OURS, gate, g, u, torch.ones_like(g))
    torch.testing.assert_close(h, gate(g, u), rtol=1e-4, atol=1e-5, equal_nan=True)
    # A slope at NaN is whatever the comparison there says; everywhere else it is the product's.
    known = ~(g.isnan() | u.isnan())
    slopes = (gate.gate.derivative(g) * gate.value(u), gate.gate(g) * gate.value.derivative(u))
    for found, value in zip((dg, du), slopes, strict=True):
        torch.testing.assert_close(found[known], value[known], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1), (3, 1, 1), (3, 5, 7)])
def test_parameters_that_are_tensors(shape: tuple[int, ...]) -> None:
    gate = GATES["situ"].bind(beta=1 + torch.rand(shape), linear_beta=(2 + torch.rand(7)).requires_grad_())
    g, u, dh = operands(3, 5, 7)
    for found, expected in zip(run(OURS, gate, g, u, dh), formula(gate, g, u, dh), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_parameter_that_changes_the_formula() -> None:
    g, u, dh = operands(3, 7)
    for linear_beta in (25.0, 2.0, None):
        gate = GATES["situ"].bind(beta=4.0, linear_beta=linear_beta)
        assert_laws(OURS, gate, g, u, dh)


def test_nothing_to_do() -> None:
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 3)):
        g = torch.empty(shape)
        assert triton.forward(GATES["swiglu"], g, g).shape == shape
        triton.backward(GATES["swiglu"], g, g, g, torch.empty(shape), None)
    one = torch.tensor(2.0)
    torch.testing.assert_close(triton.forward(GATES["swiglu"], one, one), GATES["swiglu"](one, one))


def test_offsets_past_2_to_the_31() -> None:
    views = far_apart(5)
    for view, value in zip(views, operands(3, 5, dtype=torch.float16), strict=False):
        view.copy_(value)
    for laid in (views, [v.T for v in views]):  # far rows, then far columns
        g, u, dh, dg, du = laid
        expected = formula(GATES["swiglu"], g, u, dh)
        for view in (dg, du):
            view.fill_(NAN)
        triton.backward(GATES["swiglu"], g, u, dh, dg, du)
        found = [triton.forward(GATES["swiglu"], g, u), dg.clone(), du.clone()]
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=2e-3)


def _wrong(place: str, text: str, new: str) -> Implementation:
    """Return the kernels with ``text`` in their printed body replaced by ``new``."""

    def broken(gate: Gate, backward: bool = False) -> triton_kernel.GateText:
        right = gate_text(gate, backward)
        lines = tuple(line.replace(text, new) if line.startswith(place) else line for line in right.lines)
        assert lines != right.lines or not backward
        return right._replace(lines=lines)

    def patched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(triton, "gate_text", broken)
                return function(*given)

        return call

    return patched(triton.forward), patched(triton.backward)  # pyright: ignore[reportReturnType]


def _half_forward(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    return triton.forward(gate, g.half(), u.half()).to(g.dtype)


def _no_tail(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    h = torch.zeros(g.shape)
    h[..., :-1] = triton.forward(gate, g[..., :-1], u[..., :-1])
    return h


def _ignores_strides(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    size, dense = g.shape, torch.empty(g.shape).stride()
    return triton.forward(gate, g.as_strided(size, dense), u.as_strided(size, dense))


@pytest.mark.parametrize(
    "broken",
    [
        _wrong("dg", "d_g*", "1.01*d_g*"),
        _wrong("du", "f_g", "0.99*f_g"),
        (lambda gate, g, u: triton.forward(gate, u, g), triton.backward),
        (triton.forward, lambda gate, g, u, dh, dg, du: triton.backward(gate, g, u, dh, du, dg)),
        (_half_forward, triton.backward),
        (_no_tail, triton.backward),
        (_ignores_strides, triton.backward),
    ],
)
def test_broken_kernels_are_caught(broken: Implementation) -> None:
    laid = _halves(operands(5, 63))
    assert_laws(OURS, GATES["swiglu"], *laid)
    with pytest.raises(AssertionError, match="off by"):
        assert_laws(broken, GATES["swiglu"], *laid)
