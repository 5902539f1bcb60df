"""The laws of the Triton kernels of experts, under its interpreter: test_triton.py runs this file in its own process.
Products are of float32 and float16: those of bfloat16 are wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.examples import example
from tensorformer.ops.grouped_experts import grouped_experts, resolve, triton_launch, triton_rows
from tensorformer.ops.grouped_experts import triton as kernels
from tensorformer.ops.grouped_experts.triton_rows import Rows, sort_rows, tile_table
from tensorformer.ops.operands import LAYOUTS
from tests.ops.grouped_experts.expert_laws import Case, assert_each_alone, assert_laws, call, draw, run
from tests.ops.interpreted import far_apart


def triton(case: Case) -> list[Tensor]:
    return run(case, "triton")


def assert_near(found: list[Tensor], truth: list[Tensor]) -> None:
    """Compare to 1e-5: of a result of a few numbers the rounding of the loop itself, by luck, may be nothing."""
    for a, exact in zip(found, truth, strict=True):
        assert a.shape == exact.shape
        assert a.numel() == 0 or (a - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


@settings(deadline=None, max_examples=8)
@given(
    tokens=st.sampled_from([0, 1, 2, 7, 31]),
    experts=st.sampled_from([1, 2, 3, 7]),
    top_k=st.integers(1, 3),
    d=st.sampled_from([1, 3, 7, 16]),
    d_ff=st.sampled_from([1, 3, 8, 17]),
    layout=st.sampled_from(list(LAYOUTS)),
    biases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_loop(
    tokens: int, experts: int, top_k: int, d: int, d_ff: int, layout: str, biases: bool, seed: int
) -> None:
    sizes = (tokens, experts, min(top_k, experts), d, d_ff)
    case = draw(*sizes, layout=layout, biases=biases, dtype=torch.float32, seed=seed)
    assert_near(triton(case), run(case.to(torch.float64), "reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(257, 3, 2, 65, 33), (70, 2, 2, 33, 130), (1, 33, 16, 31, 7)], ids=str)
def test_more_than_one_tile_each_way(dtype: torch.dtype, sizes: tuple[int, int, int, int, int]) -> None:
    assert_laws(triton, draw(*sizes, example(GATES["situ"]), dtype=dtype))


@pytest.mark.parametrize("name", sorted(GATES))
def test_every_gate(name: str) -> None:
    assert_laws(triton, draw(31, 1, 1, 17, 9, example(GATES[name]), layout="interleaved", dtype=torch.float32))


@pytest.mark.parametrize("name", sorted(SCALARS))
def test_two_matrix_experts(name: str) -> None:
    assert_laws(triton, draw(31, 1, 1, 17, 9, example(SCALARS[name]), halves=1, dtype=torch.float32))


def test_an_expert_may_be_named_twice_and_all_may_choose_one() -> None:
    case = draw(31, 3, 3, 5, 3, dtype=torch.float32)
    for indices in (case.indices % 2, torch.ones_like(case.indices), case.indices.int()):
        assert_laws(triton, Case(case.operands, indices, "swiglu", "gate_up", case.dy))


@pytest.mark.parametrize(("tokens", "top_k", "d", "d_ff"), [(0, 2, 5, 4), (3, 0, 5, 4), (3, 2, 5, 0), (3, 2, 0, 4)])
def test_nothing_to_do(tokens: int, top_k: int, d: int, d_ff: int) -> None:
    case = draw(tokens, 3, max(1, top_k), max(1, d), d_ff, dtype=torch.float32)
    x, gate_up, down, weights, a, b = (t for t in case.operands if t is not None)
    cut = (x[:, :d], gate_up[:, :d], down[..., :d], weights[:, :top_k], a, b[:, :d])
    for found, exact in zip(*(run(Case(cut, case.indices[:, :top_k], case.gate, case.layout, case.dy[:, :d]), i)
                              for i in ("triton", "reference")), strict=True):  # fmt: skip
        torch.testing.assert_close(found, exact)


# What is read and written


@pytest.mark.parametrize("kind", ["transposed", "every second", "all alike", "negative"])
def test_any_strides(kind: str) -> None:
    case = draw(9, 5, 2, 7, 3, dtype=torch.float32)

    def moved(t: Tensor) -> Tensor:
        if kind == "transposed":
            return t.mT.contiguous().mT
        if kind == "every second":
            wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype)
            wide[..., ::2] = t
            return wide[..., ::2]
        if kind == "negative":
            return torch._neg_view(t)  # pyright: ignore[reportPrivateImportUsage]
        return t[:1].expand_as(t)

    dy = torch.ones(()).expand(9, 7) if kind == "all alike" else moved(case.dy)
    operands = [moved(t) for t in case.operands if t is not None]
    found = []
    for dense in (False, True):
        leaves = [(t.resolve_neg().contiguous() if dense else t.detach()).requires_grad_() for t in operands]
        y = call(leaves, case, "triton")
        found.append([y, *torch.autograd.grad(y, leaves, dy.resolve_neg().contiguous() if dense else dy)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_gradients_lie_as_the_weights_do() -> None:
    case = draw(9, 5, 2, 7, 3, biases=False, dtype=torch.float32)
    x, gate_up, down, weights, *_ = case.operands
    assert down is not None
    leaf = down.mT.contiguous().mT.requires_grad_()
    (grad,) = torch.autograd.grad(call((x, gate_up, leaf, weights), case, "triton"), leaf, case.dy)
    assert grad.stride() == leaf.stride()


def test_nothing_outside_is_read_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(40, 9, 2, 21, 10, dtype=torch.float32)
    want = triton(case)
    padded = [torch.nn.functional.pad(t, (3, 3) * t.ndim, value=torch.nan) for t in case.operands if t is not None]
    inner = [t[(slice(3, -3),) * t.ndim].requires_grad_() for t in padded]
    slabs = []
    empty = torch.empty

    def poisoned(shape: Any, **options: Any) -> Tensor:
        slab = empty(torch.Size(shape).numel() + 128, **options).fill_(torch.nan)
        slabs.append(slab)
        return slab[64:-64].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda t: poisoned(t.shape, dtype=t.dtype))
    y = call(inner, case, "triton")
    found = [y, *torch.autograd.grad(y, inner, case.dy)]
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert len(slabs) == 11  # h, what is kept, y's rows; d_pre, share·h, d_shares, four gradients, dx's rows
    assert all(slab[:64].isnan().all() and slab[-64:].isnan().all() for slab in slabs)


def test_offsets_past_2_to_the_31() -> None:
    x, first, second, dy = far_apart(4)
    for view in (x, first, second, dy):
        view.copy_(torch.randn(3, 5))
    indices, weights = torch.zeros(5, 1, dtype=torch.int64), torch.rand(5, 1).half()
    for turned in (False, True):
        if turned:  # far steps of depth, then far columns
            operands = (x.T, first[None], second.T[None], weights)
            case = Case((*operands, None, None), indices, "relu2", "gate_up", dy.T)
        else:
            operands = (x, first.T[None], second[None], weights[:3])
            case = Case((*operands, None, None), indices[:3], "relu2", "gate_up", dy)
        leaves = [t.detach().requires_grad_() for t in operands]
        y = call(leaves, case, "triton")
        found = [y.detach(), *torch.autograd.grad(y, leaves, case.dy)]
        assert_laws(lambda _, found=found: found, case)


@pytest.mark.parametrize(("where", "poison"), [("x", torch.nan), ("weights", torch.inf), ("dy", -torch.inf)])
def test_a_poisoned_token_stays_alone(where: str, poison: float) -> None:
    case = draw(20, 3, 2, 7, 3, dtype=torch.float32)
    clean = triton(case)
    operands, dy = [None if t is None else t.clone() for t in case.operands], case.dy.clone()
    target = dy if where == "dy" else operands[0 if where == "x" else 3]
    assert target is not None
    target[17, -1] = poison
    y, dx, _, _, d_weights, *_ = triton(Case(tuple(operands), case.indices, case.gate, case.layout, dy))
    others = torch.arange(20) != 17
    for found, expected in ((y, clean[0]), (dx, clean[1]), (d_weights, clean[4])):
        torch.testing.assert_close(found[others], expected[others])
    assert not (dx if where == "dy" else y)[17].isfinite().all()


# Gradients


@pytest.mark.parametrize("wanted", range(6))
def test_each_gradient_alone(wanted: int) -> None:
    assert_each_alone(draw(20, 5, 2, 7, 3, dtype=torch.float32), "triton", wanted)


def test_a_second_derivative_is_that_of_the_loop() -> None:
    case = draw(5, 3, 2, 4, 3, dtype=torch.float32)
    results = []
    for impl in ("triton", "reference"):
        leaves = [t.detach().requires_grad_() for t in case.operands if t is not None]
        first = torch.autograd.grad(call(leaves, case, impl).pow(3).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves))
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (5, 1, 1), (5, 1, 3)], ids=str)
def test_parameters_that_are_tensors(shape: tuple[int, ...]) -> None:
    beta = torch.rand(shape, dtype=torch.float64) + 1
    case = draw(20, 5, 2, 7, 3, dtype=torch.float32)
    truth, usual, found = (
        run(Case(c.operands, c.indices, GATES["situ"].bind(beta=b, linear_beta=None), c.layout, c.dy), impl)
        for c, b, impl in (
            (case.to(torch.float64), beta, "reference"),
            (case, beta.float(), "reference"),
            (case, beta.float(), "triton"),
        )
    )
    for a, b, exact in zip(found, usual, truth, strict=True):
        assert (a - exact).abs().max() <= 2 * ((b - exact).abs().max() + 1.2e-7 * exact.abs().max())


@pytest.mark.parametrize("activation", [
    Gate("own", Scalar("φ", "k*x + token", ("-oo", "oo"), "here", {"k": "any number", "token": "any number"}),
         Scalar("ψ", "share*x", ("-oo", "oo"), "here", {"share": "any number"}), "here"),
    Scalar("own", "down*x + expert", ("-oo", "oo"), "here", {"down": "any number", "expert": "any number"}),
], ids=["gate", "scalar"])  # fmt: skip
def test_parameters_may_be_called_what_the_kernels_call_things(activation: Gate | Scalar) -> None:
    halves = 2 if isinstance(activation, Gate) else 1
    gate = activation.bind(**{n: 0.5 + i for i, n in enumerate(activation.needs)})
    case = draw(9, 3, 2, 5, 7, gate, halves=halves, dtype=torch.float32)
    assert_near(triton(case), run(case.to(torch.float64), "reference"))
    some = {n: torch.full((3, 1, 7), 0.5 + i) for i, n in enumerate(activation.needs)}
    tensors = Case(case.operands, case.indices, activation.bind(**some), case.layout, case.dy)
    assert_near(triton(tensors), triton(case))


# The table


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=40), height=st.sampled_from([16, 32, 64]))
def test_tiles_cover_every_row_once(counts: list[int], height: int) -> None:
    begins = torch.tensor([0, *counts]).cumsum(0)
    rows = sum(counts)
    owner = torch.full((rows,), -1)
    for expert, start, stop in tile_table(begins, rows, height).tolist():
        if start < stop:
            assert stop - start <= height
            assert (owner[start:stop] == -1).all()
            owner[start:stop] = expert
    assert torch.equal(owner, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))


def test_tiles_are_as_high_as_experts_are_busy() -> None:
    for tokens, experts, most, height in ((1, 256, 128, 16), (40, 2, 128, 32), (4096, 4, 128, 128), (4096, 4, 64, 64)):
        assert sort_rows(torch.zeros(tokens, 1, dtype=torch.int64), experts, most).height == height


# Asking for it


@pytest.mark.usefixtures("nothing_built")
def test_asked_for_by_name() -> None:
    case = draw(9, 5, 2, 7, 3, dtype=torch.float32)
    x, gate_up, down, weights, *_ = (t for t in case.operands if t is not None)
    given_ = (x, gate_up, down, "swiglu", case.indices, weights)
    assert resolve(*given_) == "fast"  # the interpreter is for tests
    assert resolve(*given_, impl="triton") == "triton"
    torch.testing.assert_close(grouped_experts(*given_, impl="triton"), grouped_experts(*given_))
    with pytest.raises(ShapeError, match="indices goes from 5 to 5: write 0 to 4"):
        grouped_experts(x, gate_up, down, "swiglu", torch.full_like(case.indices, 5), weights, impl="triton")
    with pytest.raises(ShapeError, match="indices goes from -1 to -1"):
        grouped_experts(x, gate_up, down, "swiglu", torch.full_like(case.indices, -1), weights, impl="triton")
    learned = GATES["situ"].bind(beta=torch.ones(3, requires_grad=True), linear_beta=1.0)
    with pytest.raises(ConfigError, match='has no gradient by beta of situ: write impl="fast"'):
        grouped_experts(x, gate_up, down, learned, case.indices, weights, impl="triton")
    with torch.no_grad():
        assert resolve(x, gate_up, down, learned, case.indices, weights, impl="triton") == "triton"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="can't run in bfloat16 under TRITON"):
        grouped_experts(*given_, impl="triton")
    with torch.autocast("cpu", torch.float16):
        assert grouped_experts(*given_, impl="triton").dtype == torch.float16
    with pytest.raises(ConfigError, match="is invisible to tensor subclasses, modes, tracers and transforms"):
        torch.func.grad(lambda x: grouped_experts(x, *given_[1:], impl="triton").sum())(x)


# What must be caught


def _first_row_left_out(table: Tensor) -> Tensor:
    table[:, 1] += 1
    return table


def _next_experts_weights(table: Tensor) -> Tensor:
    table[:-1, 0] = table[1:, 0]
    return table


def _last_tile_forgotten(table: Tensor) -> Tensor:
    last = int((table[:, 1] < table[:, 2]).nonzero()[-1])
    return torch.cat((table[:last], table[last + 1 :]))


def _one_row_of_the_next(table: Tensor) -> Tensor:
    table[0, 2] += 1
    table[1, 1] += 1
    return table


@pytest.mark.parametrize("broken", [_first_row_left_out, _next_experts_weights, _last_tile_forgotten,
                                    _one_row_of_the_next], ids=lambda f: f.__name__)  # fmt: skip
def test_a_wrong_table_is_caught(broken: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(20, 3, 2, 7, 3, dtype=torch.float32)
    assert_laws(triton, case)
    monkeypatch.setattr(triton_rows, "tile_table", lambda *given_: broken(tile_table(*given_)))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **options: empty(shape, **options).fill_(torch.nan))
    with pytest.raises(AssertionError):
        assert_laws(triton, case)


def _tokens_tiled(found: Rows) -> Rows:
    return found._replace(token=found.order % 20)


def _unsorted_places(found: Rows) -> Rows:
    return found._replace(order=found.order.sort().values)


def _experts_begin_late(found: Rows) -> Rows:
    return found._replace(begins=torch.cat((found.begins[:1] + 1, found.begins[1:])))


@pytest.mark.parametrize("broken", [_tokens_tiled, _unsorted_places, _experts_begin_late], ids=lambda f: f.__name__)
def test_a_wrong_order_is_caught(broken: Callable[[Rows], Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(20, 3, 2, 7, 3, dtype=torch.float32)
    monkeypatch.setattr(kernels, "sort_rows", lambda *given_: broken(sort_rows(*given_)))
    with pytest.raises(AssertionError, match="off by"):
        assert_laws(triton, case)


def _no_shares(given_: list[Any], constants: dict[str, Any]) -> None:
    if "SHARED" in constants:
        constants["SHARED"] = False


def _no_bias(given_: list[Any], constants: dict[str, Any]) -> None:
    if "KEPT" in constants:
        constants["BIASED"] = False


def _bias_has_no_part_in_weights(given_: list[Any], constants: dict[str, Any]) -> None:
    if "D_SHARE" in constants:
        constants["BIASED"] = False


def _shallow(given_: list[Any], constants: dict[str, Any]) -> None:
    if "INNER" in constants:
        given_[-3] -= 1


@pytest.mark.parametrize("broken", [_no_shares, _no_bias, _bias_has_no_part_in_weights, _shallow],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_wrong_launches_are_caught(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = draw(20, 3, 2, 7, 3, dtype=torch.float32), triton_launch._launch

    def wrong(kernel: Any, programs: int, operands: list[Any], constants: dict[str, Any], *room: int) -> None:
        broken(operands, constants)
        right(kernel, programs, operands, constants, *room)

    monkeypatch.setattr(triton_launch, "_launch", wrong)
    with pytest.raises(AssertionError, match="off by"):
        assert_laws(triton, case)
