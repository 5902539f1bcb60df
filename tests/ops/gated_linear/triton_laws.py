"""The laws of the fused kernel, under Triton's interpreter: test_gated_linear.py runs this file in its own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.ops.gated_linear import gated_linear, reference, resolve, triton
from tensorformer.ops.gated_linear.triton import Tile
from tests.ops.interpreted import assert_within_budget, far_apart

Forward = Callable[[Gate, Tensor, Tensor, Tensor], Tensor]
CPU = torch.device("cpu")


def operands(rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw operands of unlike spreads whose sums reach into the curved part of every gate."""
    draws = torch.Generator().manual_seed(rows + depth + columns)
    x, a, b = (torch.randn(n, depth, generator=draws) for n in (rows, columns, columns))
    return x.to(dtype), ((a + 0.1) * 3 / depth**0.5).to(dtype), ((b - 0.1) / depth**0.5).to(dtype)


def assert_laws(forward: Forward, gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> None:
    kept = [t.clone() for t in (x, a, b)]
    found = forward(gate, x, a, b)
    truth = reference.forward(gate, x.double(), a.double(), b.double())
    assert_within_budget(found, reference.forward(gate, x, a, b), truth, f"{gate} at {tuple(x.shape)}")
    assert all(torch.equal(t, k) for t, k in zip((x, a, b), kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["swiglu", "situ", "bilinear"])
def test_odd_sizes(name: str, dtype: torch.dtype) -> None:
    gate = example(GATES[name])
    assert triton.why_not(gate, dtype, CPU) is None
    for rows, depth, columns in ((1, 1, 1), (3, 7, 63), (7, 63, 3), (65, 257, 33), (130, 63, 257), (17, 1368, 7)):
        assert_laws(triton.forward, gate, *operands(rows, depth, columns, dtype))


@pytest.mark.parametrize("name", sorted(GATES))
def test_every_gate(name: str) -> None:
    assert_laws(triton.forward, example(GATES[name]), *operands(7, 33, 19, torch.float32))


@pytest.mark.parametrize("tile", [Tile(16, 16, 16, 4, 2), Tile(64, 32, 64, 4, 3), Tile(128, 128, 32, 8, 3)])
def test_every_tile(tile: Tile) -> None:
    def forward(gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return triton.forward(gate, x, a, b, tile)

    # More row blocks than go together in a group, and a last group that is short.
    assert_laws(forward, GATES["swiglu"], *operands(161, 65, 37, torch.float32))


def test_any_strides_and_leading_axes() -> None:
    gate = GATES["swiglu"]
    x, a, b = operands(24, 21, 10, torch.float32)
    truth = reference.forward(gate, x, a, b)
    wide = torch.full((24, 43), float("nan"))
    wide[:, 1::2] = x
    shared = torch.full((21, 25), float("nan"))
    shared[:, 2:22:2], shared[:, 3:23:2] = a.T, b.T
    found = triton.forward(gate, wide[:, 1::2], shared.T[2:22:2], shared.T[3:23:2])
    torch.testing.assert_close(found, truth)
    axes = x.view(2, 3, 4, 21).transpose(0, 2)
    torch.testing.assert_close(triton.forward(gate, axes, a, b), truth.view(2, 3, 4, 10).transpose(0, 2))
    torch.testing.assert_close(triton.forward(gate, x[5], a, b), truth[5])
    same = x[:1].expand(4, 21)
    torch.testing.assert_close(triton.forward(gate, same, a, b), truth[:1].expand(4, 10))


def test_nothing_outside_is_read_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = GATES["swiglu"]
    x, a, b = operands(5, 21, 10, torch.float32)
    inner = [torch.nn.functional.pad(t, (3, 3, 3, 3), value=float("nan"))[3:-3, 3:-3] for t in (x, a, b)]
    poisoned = torch.full((1, 10 * 5 + 64), float("nan"))
    monkeypatch.setattr(triton.torch, "empty", lambda shape, **_: poisoned[0, 32:-32].view(shape))
    found = triton.forward(gate, inner[0], inner[1], inner[2])
    monkeypatch.undo()
    torch.testing.assert_close(found, reference.forward(gate, x, a, b))
    assert poisoned[0, :32].isnan().all()
    assert poisoned[0, -32:].isnan().all()


def test_offsets_past_2_to_the_31() -> None:
    views = far_apart(3)
    for view in views:
        view.copy_(torch.randn(3, 5))
    for x, a, b in (views, [v.T for v in views]):  # far rows, then far steps of depth
        found = triton.forward(GATES["swiglu"], x, a, b)
        torch.testing.assert_close(found, reference.forward(GATES["swiglu"], x, a, b), rtol=4e-3, atol=4e-3)


def test_one_poisoned_row_stays_alone() -> None:
    x, a, b = operands(5, 21, 10, torch.float32)
    x[2, 4] = torch.inf
    x[3, 5] = torch.nan
    found, expected = (f(GATES["swiglu"], x, a, b) for f in (triton.forward, reference.forward))
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize("rows", [(), (1,), (10,), (5, 1), (2, 5, 10)])
def test_parameters_that_are_tensors(rows: tuple[int, ...]) -> None:
    x, a, b = operands(10, 21, 10, torch.float32)
    x = x.view(2, 5, 21)
    gate = GATES["situ"].bind(beta=1 + torch.rand(rows), linear_beta=3.0)
    torch.testing.assert_close(triton.forward(gate, x, a, b), reference.forward(gate, x, a, b))


def test_nothing_to_do() -> None:
    for shape, columns in (((0, 4), 3), ((2, 0, 4), 3), ((2, 4), 0), ((3, 2, 0), 5)):
        x, a = torch.randn(shape), torch.randn(columns, shape[-1])
        assert torch.equal(triton.forward(GATES["glu"], x, a, a), reference.forward(GATES["glu"], x, a, a))


def test_asked_for_by_name() -> None:
    x, a, b = operands(3, 7, 5, torch.float32)
    assert resolve(x, a, b, "swiglu") == "reference"  # the interpreter is for tests
    assert resolve(x, a, b, "swiglu", impl="triton") == "triton"
    expected = gated_linear(x, a, b, "swiglu")
    torch.testing.assert_close(gated_linear(x, a, b, "swiglu", impl="triton"), expected)
    with pytest.raises(ConfigError, match=r"has no gradient: call it under torch\.no_grad\(\)"):
        gated_linear(x, a.requires_grad_(), b, "swiglu", impl="triton")
    with torch.no_grad():
        torch.testing.assert_close(gated_linear(x, a, b, "swiglu", impl="triton"), expected)
    with torch.no_grad(), pytest.raises(ConfigError, match="can't run in bfloat16 under TRITON_INTERPRET=1"):
        gated_linear(x.bfloat16(), a.bfloat16(), b.bfloat16(), "swiglu", impl="triton")


def _swapped(gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return triton.forward(gate, x, b, a)


def _short(gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return triton.forward(gate, x[..., :-1], a[:, :-1], b[:, :-1])


def _half(gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return triton.forward(gate, x.half(), a.half(), b.half()).to(x.dtype)


def _ignores_strides(gate: Gate, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return triton.forward(gate, x.as_strided(x.shape, (x.shape[1], 1)), a, b)


@pytest.mark.parametrize("broken", [_swapped, _short, _half, _ignores_strides])
def test_broken_kernels_are_caught(broken: Forward) -> None:
    x, a, b = operands(7, 33, 19, torch.float32)
    x = x.T.contiguous().T
    assert_laws(triton.forward, GATES["swiglu"], x, a, b)
    with pytest.raises(AssertionError, match="off by"):
        assert_laws(broken, GATES["swiglu"], x, a, b)
