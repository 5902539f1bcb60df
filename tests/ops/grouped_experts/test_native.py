"""Experts in C++: against the loop in float64, whatever the sizes, strides and threads; kept, sealed, and refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.errors import ShapeError
from tensorformer.gates import GATES, SCALARS
from tensorformer.gates.examples import example
from tensorformer.ops import native_build
from tensorformer.ops.grouped_experts import native
from tensorformer.ops.grouped_experts.activation import ready
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.operands import LAYOUTS
from tests.ops.act_and_mul.processes import run_alone
from tests.ops.grouped_experts.expert_laws import Case, assert_each_alone, assert_laws, call, draw, run

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    native_build.why_not() is not None or not torch.backends.mkl.is_available(), reason="no C++ compiler or no MKL here"
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One empty cache for the module, so that each activation is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TENSORFORMER_CACHE", str(folder))
        patch.setattr(native, "_BUILT", {})
        yield folder / "native"


def run_native(case: Case) -> list[Tensor]:
    return run(case, "native")


@given(
    tokens=st.sampled_from([0, 1, 2, 3, 7, 63, 257]),
    experts=st.sampled_from([1, 2, 3, 7, 33]),
    top_k=st.integers(1, 7),
    d=st.sampled_from([1, 3, 7, 16, 33]),
    d_ff=st.sampled_from([1, 3, 8, 63]),
    layout=st.sampled_from(list(LAYOUTS)),
    biases=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_native_is_the_loop(
    tokens: int, experts: int, top_k: int, d: int, d_ff: int, layout: str, biases: bool, dtype: torch.dtype, seed: int
) -> None:
    case = draw(tokens, experts, min(top_k, experts), d, d_ff, layout=layout, biases=biases, dtype=dtype, seed=seed)
    assert_laws(run_native, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_than_any_block(dtype: torch.dtype) -> None:
    """More rows of an expert, and a wider and deeper product, than are worked on at a time."""
    assert_laws(run_native, draw(900, 3, 2, 37, 19, dtype=dtype))
    assert_laws(run_native, draw(40, 3, 2, 813, 7, dtype=dtype))
    assert_laws(run_native, draw(40, 2, 1, 31, 287, biases=False, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tokens_on_one_expert_one_named_twice_and_no_width(dtype: torch.dtype) -> None:
    case = draw(63, 5, 1, 7, 3, dtype=dtype)
    for e in (0, 4):
        assert_laws(run_native, Case(case.operands, torch.full((63, 1), e), case.gate, case.layout, case.dy))
    x, gate_up, down, _, *biases = case.operands
    twice = Case((x, gate_up, down, torch.rand(63, 4).to(dtype), *biases), torch.randint(5, (63, 4)), "swiglu",
                 "gate_up", case.dy)  # fmt: skip
    assert_laws(run_native, twice)
    assert_laws(run_native, draw(63, 5, 5, 7, 3, dtype=dtype))
    assert_laws(run_native, draw(7, 3, 2, 5, 0, dtype=dtype))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_do(tokens: int, top_k: int) -> None:
    y, dx, *rest = run_native(draw(tokens, 3, top_k, 5, 4, dtype=torch.float32))
    assert y.shape == dx.shape == (tokens, 5)
    assert not any(t.any() for t in (y, dx, *rest))


OTHERS = ["bilinear", "situ", "swiglu_oai", "swiglu_clamp_after", "geglu", "relu2", "identity", "xielu", "gelu"]


@pytest.mark.parametrize("name", [n if n == "relu2" else pytest.param(n, marks=pytest.mark.slow) for n in OTHERS])
def test_gates_and_functions(name: str) -> None:
    halves = 2 if name in GATES else 1
    gate = example(GATES[name]) if name in GATES else example(SCALARS[name])
    for layout in LAYOUTS if halves == 2 else ["gate_up"]:
        for dtype in DTYPES:
            assert_laws(run_native, draw(31, 5, 3, 17, 9, gate, layout=layout, halves=halves, dtype=dtype))


# Memory


def strided(t: Tensor, kind: str) -> Tensor:
    if kind == "transposed":
        return t.mT.contiguous().mT
    if kind == "every second":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    if kind == "part of more":
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), torch.nan, dtype=t.dtype)
        wide[..., 2:-3] = t
        return wide[..., 2:-3]
    return t[:1].expand_as(t)


@pytest.mark.parametrize("kind", ["transposed", "every second", "part of more", "all alike"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(kind: str, dtype: torch.dtype) -> None:
    case = draw(9, 5, 2, 7, 3, dtype=dtype)
    operands = [None if t is None else strided(t, kind) for t in case.operands]
    dy = strided(case.dy, kind)
    found = []
    for dense in (False, True):
        leaves = [t if t is None else (t.contiguous() if dense else t).requires_grad_() for t in operands]
        y = call(leaves, case, "native")
        grads = torch.autograd.grad(y, [t for t in leaves if t is not None], dy.contiguous() if dense else dy)
        if kind == "transposed" and not dense:
            assert grads[1].stride() == leaves[1].stride()  # pyright: ignore[reportOptionalMemberAccess]
        found.append([y, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_a_sum_has_a_gradient_of_stride_zero() -> None:
    case = draw(63, 5, 2, 7, 3, dtype=torch.float32)
    found = []
    for impl in ("native", "reference"):
        leaves = [None if t is None else t.detach().requires_grad_() for t in case.operands]
        call(leaves, case, impl).sum().backward()
        found.append([t.grad for t in leaves if t is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_memory_is_never_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and the memory of the threads full of NaN, whatever the dtype that it is read as."""
    cases = [draw(63, 16, 2, 7, 3, dtype=dtype), draw(1, 9, 3, 33, 5, dtype=dtype)]
    expected = [run_native(case) for case in cases]
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def poisoned(t: Tensor) -> Tensor:
        return t.fill_(255 if t.dtype == torch.uint8 else torch.nan if t.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda t, *a, **k: poisoned(new_empty(t, *a, **k)))
    found = [run_native(case) for case in cases]
    monkeypatch.undo()
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", range(6))
def test_each_gradient_alone(wanted: int) -> None:
    assert_each_alone(draw(31, 5, 2, 7, 3, dtype=torch.float32), "native", wanted)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "weights", "dy"])
def test_a_poisoned_token_stays_alone(poison: float, where: str) -> None:
    for dtype in DTYPES:
        case = draw(63, 5, 2, 7, 3, dtype=dtype)
        clean = run_native(case)
        operands, dy = [None if t is None else t.clone() for t in case.operands], case.dy.clone()
        target = dy if where == "dy" else operands[0 if where == "x" else 3]
        assert target is not None
        target[17, -1] = poison
        y, dx, _, _, d_weights, *_ = run_native(Case(tuple(operands), case.indices, case.gate, case.layout, dy))
        others = torch.arange(63) != 17
        for found, expected in ((y, clean[0]), (dx, clean[1]), (d_weights, clean[4])):
            assert torch.equal(found[others], expected[others])
        assert not (dx if where == "dy" else y)[17].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_and_a_second_time(dtype: torch.dtype) -> None:
    case = draw(257, 9, 3, 65, 33, dtype=dtype)
    alone = run_native(case)
    torch.set_num_threads(3)
    try:
        together = [run_native(case) for _ in range(3)]
    finally:
        torch.set_num_threads(1)
    for found in together:
        for a, b in zip(alone, found, strict=True):
            assert torch.equal(a, b)


FORK = """
import os, torch
torch.set_num_threads(2)
from tensorformer.ops.grouped_experts import grouped_experts
x, a, b, w = torch.randn(300, 33), torch.randn(8, 33, 34), torch.randn(8, 17, 33), torch.rand(300, 2)
i = torch.arange(600).view(300, 2) % 8
def bits():
    return bytes(grouped_experts(x, a, b, "swiglu", i, w, impl="native").untyped_storage())
before = bits()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    print("good")
else:
    os._exit(0 if bits() == before else 1)
"""


def test_a_fork() -> None:
    """A child has none of its parent's threads, and must not wait for them."""
    native.prepare(ready("swiglu", "gate_up"), torch.float32)
    ((out, err),) = run_alone(FORK)
    assert out == "good\n", err


def test_an_index_that_names_no_expert() -> None:
    case = draw(6, 4, 2, 5, 3, dtype=torch.float32)
    for wrong, said in ((torch.tensor([[0, -1], [4, 0]] * 3), "-1 to 4"), (torch.full((6, 2), 4), "4 to 4")):
        with pytest.raises(ShapeError, match=f"indices goes from {said}: write 0 to 3, one of 4 experts"):
            call(case.operands, Case((), wrong, case.gate, case.layout, case.dy), "native")


def test_operands_are_held_while_it_runs() -> None:
    """Copies made on the way, of matrices of strides that C++ does not take, live until it is done."""
    case = draw(31, 5, 2, 7, 3, dtype=torch.float32)
    operands = Operands(*(None if t is None else strided(t, "every second") for t in case.operands))  # pyright: ignore
    swiglu = ready("swiglu", "gate_up")
    y, _ = native.forward(operands, native.groups_of(operands, case.indices), swiglu, keep=False)
    torch.testing.assert_close(y, call(case.operands, case, "reference"))


# Autograd, graphs, dtypes


def test_second_derivatives() -> None:
    """They go through the reference: as right as those of `fast`."""
    case = draw(7, 3, 2, 5, 3, dtype=torch.float32)
    found = []
    for impl, dtype in (("native", torch.float32), ("reference", torch.float64)):
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in case.operands]
        given_ = [t for t in leaves if t is not None]
        first = torch.autograd.grad(call(leaves, case, impl), given_, case.dy.to(dtype), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given_))  # pyright: ignore
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
def test_autocast(indices: torch.dtype) -> None:
    case = draw(63, 5, 2, 17, 9, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in case.operands if t is not None]
    case = Case((), case.indices.to(indices), case.gate, case.layout, case.dy)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(leaves, case, "native")
    grads = torch.autograd.grad(y, leaves, case.dy.bfloat16())
    small = [t if i == 3 else t.detach().bfloat16().requires_grad_() for i, t in enumerate(leaves)]
    alone = call(small, case, "native")
    assert torch.equal(y, alone)
    for grad, expected in zip(grads, torch.autograd.grad(alone, small, case.dy.bfloat16()), strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected.float())


COMPILED = """
import torch
from tensorformer.ops.grouped_experts import grouped_experts

E, k, d, f = 5, 2, 8, 4

def call(x, gate_up, down, weights, bias, indices):
    return grouped_experts(x * 2, gate_up, down, "swiglu", indices, weights, down_bias=bias, impl="native") + 1

compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
for tokens in (6, 9):
    for dtype in (torch.float32, torch.bfloat16):
        shapes = ((tokens, d), (E, d, 2 * f), (E, f, d), (tokens, k), (E, d))
        operands = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
        indices = torch.rand(tokens, E).topk(k).indices
        results = []
        for run in (call, compiled):
            y = run(*operands, indices)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), operands)])
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)
print("same")
"""


@pytest.mark.slow
def test_one_graph() -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
