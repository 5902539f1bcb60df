"""The laws of the Triton kernels, under its interpreter: test_linear_attention_triton.py runs this file in its own
process. Products are of float32 and float16: those of bfloat16 are wrong there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.ops.linear_attention import linear_attention, resolve, triton, triton_launch
from tensorformer.ops.linear_attention.compiled import linear_attention_op
from tensorformer.ops.linear_attention.triton_launch import Exponents, Launches
from tests.ops import linear_attention_laws as laws
from tests.ops.interpreted import far_apart
from tests.ops.linear_attention_laws import Operands, operands, run
from tests.ops.test_linear_attention_contract import alike, strided

op = functools.partial(linear_attention, impl="triton")


def small(time: int, key_dims: tuple[int, ...] = (2, 3), decay: str = "mild", **sizes: Any) -> Operands:
    """Draw operands of one head, if nothing else is said: the interpreter takes its time for every program."""
    return operands(time, key_dims, decay, **{"batch": 1, "heads": 1, "value": 3, **sizes})


def keeps_the_budget(x: Operands, dtype: torch.dtype = torch.float32, chunk: int | None = 16) -> None:
    laws.keeps_the_error_budget(op, x, dtype, chunk=chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("key_dims", "value", "decay"),
    [((3,), 16, "strong"), ((16,), 5, "none"), ((3, 8), 1, "mild"), ((8, 3), 5, "resets"), ((16, 1), 16, "strong")],
    ids=str,
)
def test_error_budget(dtype: torch.dtype, key_dims: tuple[int, ...], value: int, decay: str) -> None:
    for seed, time in enumerate([1, 3, 17, 65] if dtype == torch.float32 else [17]):
        heads = 2 if time < 65 else 1
        x = small(time, key_dims, decay, state=seed % 2 == 0, value=value, heads=heads, seed=seed)
        keeps_the_budget(x, dtype, 16 if time < 65 else 32)


@pytest.mark.parametrize("key_dims", [(70,), (5, 20)], ids=str)
def test_more_features_and_values_than_a_program_holds(key_dims: tuple[int, ...]) -> None:
    keeps_the_budget(small(17, key_dims, state=True, value=35))


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, None), (torch.float16, 64)], ids=str)
def test_every_chunk(dtype: torch.dtype, chunk: int | None) -> None:
    keeps_the_budget(small(67, decay="strong", state=True), dtype, chunk)


@pytest.mark.parametrize("rate", [-1e-4, -5.0, -20.0, -1000.0])
def test_decays_of_any_strength_at_every_step(rate: float) -> None:
    x = small(40, state=True)
    assert x.log_decay is not None
    x.log_decay = x.log_decay + rate
    keeps_the_budget(x, chunk=32)


def test_float16_products_of_scores_may_exceed_float16_and_nan_stays() -> None:
    """q₁·k₁ and q₂·k₂ are 500 each: their product is beyond float16, times a small value it is not."""
    q = torch.full((1, 8, 1, 5), 10.0, dtype=torch.float16)
    v = torch.full((1, 8, 1, 2), 1e-3, dtype=torch.float16)
    y, _ = op((q, q), (q, q), v)
    torch.testing.assert_close(y[0, :, 0, 0].float(), 250 * torch.arange(1.0, 9.0), rtol=2e-3, atol=0)
    v[0, 3] = torch.tensor(-1, dtype=torch.int16).view(torch.float16)  # a NaN of ones
    y, s = op((q, q), (q, q), v)
    assert y[0, 3:].isnan().all()
    assert s is not None
    assert s.isnan().all()


def test_a_reset_forgets_and_its_decay_has_no_gradient() -> None:
    x = small(40, decay="resets", state=True, seed=3).to(torch.float32)
    assert x.log_decay is not None
    resets = x.log_decay.isinf()
    assert resets.any()
    found = run(op, x, chunk=16)
    assert all(t.isfinite().all() for t in found.values())
    assert not found["d_log_decay"][resets].any()


@pytest.mark.parametrize(("decay", "state"), [("none", True), ("strong", False)])
def test_any_number_of_windows_is_one(decay: str, state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = small(50, decay=decay, state=state).to(torch.float32)
    whole = run(op, x, chunk=16)
    for kept in (0, 2 * 6 * 3 * 4):  # bytes: of no state, then of those of two chunks
        monkeypatch.setattr(triton_launch, "KEPT", kept)
        laws.assert_near(run(op, x, chunk=16), whole, 0.0)


def test_what_is_not_asked_for() -> None:
    x = small(17, state=True).to(torch.float32).map(lambda _, t: t.requires_grad_())
    truth = x.to(torch.float64).map(lambda _, t: t.requires_grad_())
    for time in (5, 17):
        part, exact = x.steps(None, time, x.state), truth.steps(None, time, truth.state)
        (y, nothing), (want, _) = part.call(op, chunk=16, final_state=False), exact.call(laws.reference)
        assert nothing is None
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
        for i, names in ((0, ("q0", "v")), (0, ("log_decay",)), (1, ("k1", "state"))):
            found, expected = (
                torch.autograd.grad(t.call(f)[i].square().sum(), [s.named()[n] for n in names])
                for t, s, f in ((part, x, functools.partial(op, chunk=16)), (exact, truth, laws.reference))
            )
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_segments_shared_heads_and_beta() -> None:
    x = small(23, decay="strong", state=True, batch=2, groups=2)
    x.beta = torch.rand(2, 23, 2, dtype=torch.float64)
    x.segments = torch.tensor([[0] * 9 + [-1] * 3 + [4] * 11, [-1] * 2 + [1] * 16 + [0] * 5])
    keeps_the_budget(x)


def test_rows_are_independent_in_any_order_and_causal() -> None:
    for decay in ("none", "mild"):
        x = small(18, decay=decay, state=True, batch=2).to(torch.float32)
        laws.rows_are_independent(op, x, chunk=16)
        laws.batch_order_is_irrelevant(op, x, chunk=16)
        for step in (15, 16):
            laws.is_causal(op, x, step, chunk=16)


@pytest.mark.parametrize("change", [strided, alike])
@pytest.mark.parametrize("decay", ["none", "mild"])
def test_any_strides(change: Callable[[str, Tensor], Tensor], decay: str) -> None:
    x = small(17, decay=decay, state=True, batch=2, heads=2).to(torch.float32).map(change)
    contiguous = x.map(lambda _, t: t.contiguous())
    kept = contiguous.map(lambda _, t: t.clone())
    laws.assert_near(run_in_place(x), run_in_place(contiguous), 0.0)
    for name, t in contiguous.named().items():
        assert torch.equal(t, kept.named()[name])


def run_in_place(x: Operands) -> dict[str, Tensor]:
    """Like `run`, on these very tensors, whose strides a copy would not have; the gradient of y has stride 0."""
    leaves = x.map(lambda _, t: t.detach().requires_grad_())
    y, s = leaves.call(op, chunk=16)
    named = leaves.named()
    found = torch.autograd.grad(y.sum() + s.square().sum(), list(named.values()))
    return {"y": y, "s": s, **dict(zip(named, found, strict=True))}


@pytest.mark.parametrize("columns", [False, True])
def test_offsets_past_2_to_the_31(columns: bool) -> None:
    views = [view.T if columns else view for view in far_apart(5)]
    for view in views:
        view.copy_(torch.randn(view.shape))
    q1, q2, k1, k2, v = (view[None, :, None] for view in views)
    far = Operands((q1, q2), (k1, k2), v, torch.tensor([[-0.5, -0.1, -2.0, -0.3, -1.0][: v.shape[1]]])[..., None])
    found, near = run_in_place(far), run_in_place(far.map(lambda _, t: t.contiguous()))
    laws.assert_near(found, near, 0.0)
    laws.keeps_the_error_budget(op, far, torch.float16)


def test_nothing_outside_is_read_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    x = small(17, decay="mild", state=True).to(torch.float32)
    want = run(op, x, chunk=16)
    inner = x.map(lambda _, t: torch.nn.functional.pad(t, (3, 3) * t.ndim, value=torch.nan)[(slice(3, -3),) * t.ndim])
    slabs = []
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        slab = empty(shape.numel() + 128, **options).fill_(torch.nan)
        slabs.append(slab)
        return slab[64:-64].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    leaves = inner.map(lambda _, t: t.requires_grad_())
    y, s = leaves.call(op, chunk=16)
    dy, ds = laws.uneven(y.shape, 1).float(), laws.uneven(s.shape, 2).float()
    found = torch.autograd.grad([y, s], list(leaves.named().values()), [dy, ds])
    monkeypatch.undo()
    for name, t in zip(("y", "final state", *(f"d_{n}" for n in leaves.named())), (y, s, *found), strict=True):
        assert torch.equal(t, want[name]), name
    assert len(slabs) > 8
    assert all(slab[:64].isnan().all() and slab[-64:].isnan().all() for slab in slabs)


def test_nothing_to_do() -> None:
    given: list[dict[str, Any]] = [
        *({"time": 0, "state": state, "decay": decay} for state in (False, True) for decay in ("none", "mild")),
        *({"time": 3, "heads": 0}, {"time": 3, "value": 0}, {"time": 3, "key_dims": (4, 0)}),
    ]
    for sizes in given:
        x = operands(**sizes).to(torch.float32)
        found = run(op, x)
        initial = found["final state"] if x.state is None else x.state
        assert torch.equal(found["final state"], initial)
        passed_on = laws.uneven(initial.shape, 2).float() if x.state is not None else None
        assert all(not t.any() for n, t in found.items() if n not in ("final state", "d_state"))
        assert passed_on is None or torch.equal(found["d_state"], passed_on)


def test_a_second_derivative_is_that_of_the_recurrence() -> None:
    results = []
    for f in (op, laws.reference):
        x = small(5, (2, 3), state=True).to(torch.float32).map(lambda _, t: t.requires_grad_())
        leaves = list(x.named().values())
        y, s = x.call(f)
        first = torch.autograd.grad(y.pow(3).sum() + s.pow(3).sum(), leaves, create_graph=True)
        squares = torch.stack([g.square().sum() for g in first])
        results.append(torch.autograd.grad(squares.sum(), leaves))
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("final", [False, True])
def test_operator_is_registered_properly(final: bool) -> None:
    x = small(3, state=final, decay="mild" if final else "none").to(torch.float32)
    x = x.map(lambda _, t: t.requires_grad_())
    arguments = (list(x.q), list(x.k), x.v, x.log_decay, x.state, 16, final, "triton")
    torch.library.opcheck(linear_attention_op, arguments)


def test_asked_for_by_name() -> None:
    x = small(40).to(torch.float32)
    assert x.call(resolve)[0] == "fast"  # the interpreter is for tests
    assert tuple(x.call(resolve, impl="triton")) == ("triton", "chunked", 32)
    assert tuple(x.call(resolve, impl="triton", chunk=16)) == ("triton", "chunked", 16)
    assert tuple(x.to(torch.float16).call(resolve, impl="triton")) == ("triton", "quadratic", 64)
    assert tuple(small(9).to(torch.float32).call(resolve, impl="triton")) == ("triton", "quadratic", 16)
    y, s = x.call(op)
    want, state = x.call(linear_attention, impl="reference")
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(s, state, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="can't run in bfloat16 under TRITON_INTERPRET=1"):
        x.to(torch.bfloat16).call(op)


# What must be caught.


Exponential = Callable[[Tensor, int], Exponents]


def _forgets_nothing(right: Exponential, log_decay: Tensor, chunk: int) -> Exponents:
    return right(torch.zeros_like(log_decay), chunk)


def _sums_in_float32(right: Exponential, log_decay: Tensor, chunk: int) -> Exponents:
    octave, fraction = right(log_decay, chunk)
    total = octave + fraction
    return Exponents(total.round(), total - total.round())


def _in_one_part(right: Exponential, log_decay: Tensor, chunk: int) -> Exponents:
    octave, fraction = right(log_decay, chunk)
    return Exponents(octave + fraction, torch.zeros_like(fraction))


@pytest.mark.parametrize("broken", [_forgets_nothing, _sums_in_float32, _in_one_part])
def test_wrong_decays_are_caught(broken: Callable[..., Exponents], monkeypatch: pytest.MonkeyPatch) -> None:
    x = small(40, decay="strong")
    keeps_the_budget(x, chunk=32)
    right = triton_launch.exponents
    monkeypatch.setattr(triton_launch, "exponents", lambda *given: broken(right, *given))
    with pytest.raises(AssertionError, match="eps, reference"):
        keeps_the_budget(x, chunk=32)


def _one_percent(given: dict[str, Any]) -> None:
    given["dy"] = given["dy"] * 1.01


def _swaps_queries_and_keys(given: dict[str, Any]) -> None:
    dq, dk, dv = given["grads"]
    given["grads"] = (dk, dq, dv)


def _without_the_state(given: dict[str, Any]) -> None:
    given["kept"] = None


def _without_its_gradient(given: dict[str, Any]) -> None:
    given["d_kept"] = None


@pytest.mark.parametrize("broken", [_one_percent, _swaps_queries_and_keys, _without_the_state, _without_its_gradient])
def test_wrong_gradients_are_caught(broken: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    right, signature = Launches.gradients, inspect.signature(Launches.gradients)

    def wrong(*arguments: Any) -> None:
        given = dict(signature.bind(*arguments).arguments)
        broken(given)
        right(**given)

    x = small(21, state=True)
    keeps_the_budget(x)
    monkeypatch.setattr(Launches, "gradients", wrong)
    with pytest.raises(AssertionError, match="d_"):
        keeps_the_budget(x)


def test_a_decay_counted_a_step_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton._decay_grad
    monkeypatch.setattr(triton, "_decay_grad", lambda into, past, given: right(into, past.roll(-1, 2), given))
    with pytest.raises(AssertionError, match="d_log_decay"):
        keeps_the_budget(small(21, state=True))
