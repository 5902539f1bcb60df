"""Every one of the twelve points obeys the laws, in each form, and the laws catch implementations that don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.ops.linear_attention import (
    api,
    channel_decay,
    linear_attention,
    resolve,
    segments,
    segments_from_cu_seqlens,
)
from tensorformer.ops.linear_attention.channel_decay import ChannelDecay
from tensorformer.ops.linear_attention.head_decay import HeadDecay
from tensorformer.ops.linear_attention.tree import Tree
from tests.ops import linear_attention_laws as laws
from tests.ops.linear_attention_laws import POINTS, Operands, Point, small_tiles

every_point = pytest.mark.parametrize("point", POINTS, ids=str)
fast = linear_attention
SIZES = st.fixed_dictionaries(
    {
        "time": st.integers(1, 30),
        "kind": st.sampled_from(["mild", "strong", "resets"]),
        "state": st.booleans(),
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "groups": st.integers(1, 2),
        "value": st.sampled_from([1, 5]),
        "seed": st.integers(0, 2**16),
    }
)
CHUNKS = st.sampled_from([None, 1, 3, 7, 8, 40])
POINT = st.sampled_from(POINTS)


@every_point
@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_every_form_equals_the_recurrence(point: Point, chunk: int) -> None:
    with small_tiles():
        laws.equals_the_recurrence(fast, point.operands(23, state=True, groups=2), chunk=chunk)


@given(POINT, SIZES, CHUNKS)
def test_any_sizes(point: Point, sizes: dict[str, Any], chunk: int | None) -> None:
    with small_tiles():
        laws.equals_the_recurrence(fast, point.operands(**sizes), chunk=chunk)


@every_point
@pytest.mark.parametrize("time", [1, 63, 65, 257])
def test_real_chunks_at_sizes_off_them(point: Point, time: int) -> None:
    laws.equals_the_recurrence(fast, point.operands(time, batch=1, heads=2), chunk=None)


@every_point
@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_laws_without_gradients(point: Point, chunk: int) -> None:
    x = point.operands(23, state=True, batch=3)
    with small_tiles():
        laws.prefix_then_suffix_is_the_whole(fast, x, 9, chunk=chunk)
        laws.is_causal(fast, x, 11, chunk=chunk)
        laws.batch_order_is_irrelevant(fast, x, chunk=chunk)


@every_point
def test_rows_are_independent(point: Point) -> None:
    with small_tiles():
        laws.rows_are_independent(fast, point.operands(17, state=True), chunk=5)


@every_point
@pytest.mark.parametrize("op", [fast, laws.reference], ids=["fast", "reference"])
def test_padded_rows_are_rows_alone(point: Point, op: laws.Op) -> None:
    with small_tiles():
        laws.padded_rows_are_rows_alone(op, point.operands(12, state=True), chunk=5)


@every_point
@pytest.mark.parametrize("op", [fast, laws.reference], ids=["fast", "reference"])
def test_packed_documents_are_documents_alone(point: Point, op: laws.Op) -> None:
    for chunk in (1, 6, 24):
        for state in (False, True):
            with small_tiles():
                x = point.operands(24, state=state, groups=2)
                laws.packed_documents_are_documents_alone(op, x, [3, 6, 1, 1, 9, 4], chunk=chunk)


@every_point
def test_packed_gradients(point: Point) -> None:
    x = point.operands(24, state=True)
    x.segments = torch.tensor([[0] * 5 + [1] * 8 + [-1] * 2 + [1] * 3 + [0] * 6, [-1] * 4 + [9] * 3 + [2] * 17])
    with small_tiles():
        laws.equals_the_recurrence(fast, x, chunk=7)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 4))
def test_segments_from_cu_seqlens(lengths: list[int], more: int) -> None:
    cumulated = torch.tensor([0, *lengths]).cumsum(0).int()
    time = sum(lengths) + more
    want = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * more
    assert segments_from_cu_seqlens(cumulated, time).tolist() == [want]


def test_a_row_of_padding_keeps_its_state() -> None:
    for point in POINTS:
        x = point.operands(9, state=True)
        x.segments = torch.full((2, 9), -1)
        for impl in ("fast", "reference"):
            y, s = x.call(linear_attention, impl=impl)
            assert not y.any()
            assert x.state is not None
            assert torch.equal(s, x.state)


def test_nan_in_padding_reaches_nothing() -> None:
    for point in POINTS:
        x = point.operands(9, state=True)
        x.segments = torch.tensor([[-1] * 3 + [0] * 6, [0] * 5 + [-1] * 4])
        padding = x.segments < 0

        def poison(name: str, t: Tensor, padding: Tensor = padding) -> Tensor:
            filled = padding.view(2, 9, *(1,) * (t.ndim - 2))
            return t if name == "state" else t.masked_fill(filled, torch.nan)

        laws.assert_near(laws.run(fast, x.map(poison), chunk=4), laws.run(laws.reference, x))


@every_point
def test_decoding_step_by_step(point: Point) -> None:
    x = point.operands(9, state=True, groups=2)
    y, last = x.call(fast)
    state, outputs = x.state, []
    with torch.no_grad():
        for t in range(9):
            before = None if state is None else state.clone()
            out, after = x.steps(t, t + 1, state).call(fast)
            assert state is not None
            assert before is not None
            assert torch.equal(state, before), "the older state was written to"
            state = after
            outputs.append(out)
    assert state is not None
    laws.assert_near({"y": torch.cat(outputs, 1), "s": state}, {"y": y, "s": last})


@pytest.mark.parametrize("point", [p for p in POINTS if p.update == "delta" or p.decay == "channel"], ids=str)
def test_first_and_second_derivatives(point: Point) -> None:
    dims = (2,) if point.degree == 1 else (2, 1)
    x = point.operands(3, key_dims=dims, state=True, batch=1, heads=1, groups=2, value=1)
    names = list(x.named())

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        return x.map(lambda name, _: given[name]).call(linear_attention, chunk=2)

    leaves = [t.requires_grad_() for t in x.named().values()]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_polarisation_under_the_delta_rule_does_not_hold_but_without_it_does() -> None:
    """(q₁·k₁)(q₂·k₂) = ¼[((q₁;q₂)·(k₁;k₂))² − ((q₁;−q₂)·(k₁;k₂))²], which is linear in what is written."""
    x = Point(2, "head", "additive").operands(33, key_dims=(4, 4))
    x.beta = torch.rand(2, 33, 3, dtype=torch.float64)
    (q1, q2), (k1, k2) = x.q, x.k
    both, opposed, keys = (torch.cat(pair, -1) for pair in ((q1, q2), (q1, -q2), (k1, k2)))

    def call(q: Tensor, k: Tensor, update: str) -> Tensor:
        return linear_attention((q, q), (k, k), x.v, x.log_decay, beta=x.beta, update=update, chunk=8)[0]

    for update, holds in (("additive", True), ("delta", False)):
        x.update = update
        found = (call(both, keys, update) - call(opposed, keys, update)) / 4
        assert torch.allclose(x.call(fast, chunk=8)[0], found, rtol=0, atol=1e-12) == holds


def test_the_delta_rule_replaces_what_a_key_finds() -> None:
    """With β = 1 and unit keys, what is read back with the key just written is the value just written."""
    for degree in (1, 2):
        x = Point(degree, "none", "delta").operands(40, state=True)
        x.q, x.beta = x.k, None
        y, _ = x.call(fast)
        torch.testing.assert_close(y, x.v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("degree", [1, 2])
def test_the_delta_rule_with_long_keys_diverges(degree: int) -> None:
    """β‖φ(k)‖² beyond 2 multiplies an error at every step; up to 2 it cannot grow."""

    def size(length: float) -> float:
        x = Point(degree, "none", "delta").operands(300, seed=1)
        x.beta = torch.ones_like(x.v[..., 0])
        x.k = tuple(b * length for b in x.k)
        return float(x.call(fast)[1].abs().max())

    assert size(2 ** (0.5 / degree)) < 100
    assert size(2 ** (1 / degree)) > 1e6


@pytest.mark.parametrize(
    ("point", "key_dims", "chunk"),
    [
        (Point(1, "channel", "additive"), (5,), 64),
        (Point(1, "head", "delta"), (128,), 64),
        (Point(1, "head", "delta"), (16,), 32),
        (Point(2, "channel", "delta"), (3, 4), 16),
        (Point(1, "none", "delta"), (1,), 2),
    ],
    ids=str,
)
def test_auto_takes_chunks_that_features_can_tell_apart(point: Point, key_dims: tuple[int, ...], chunk: int) -> None:
    x = point.operands(300, key_dims=key_dims, batch=1, heads=1)
    assert x.call(resolve) == ("fast", "chunked", chunk)
    assert x.steps(0, 2, None).call(resolve) == ("fast", "quadratic", 2)


# Broken on purpose: each must fail the law that is there to catch it.


def no_decay_in_what_a_key_finds_in_the_state(patch: pytest.MonkeyPatch) -> None:
    enter = HeadDecay.enter

    def broken(self: HeadDecay, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        c = rows[0].shape[1] // 2
        return (torch.cat([enter(self, rows)[0][:, :c], rows[0][:, c:]], 1), *rows[1:])

    patch.setattr(HeadDecay, "enter", broken)


def no_decay_in_what_a_key_finds_in_its_chunk(patch: pytest.MonkeyPatch) -> None:
    mask = HeadDecay._mask

    def broken(self: HeadDecay, rows: Tensor, k: Tensor) -> Tensor:
        right, c = mask(self, rows, k), k.shape[1]
        return torch.cat([right[:, :c], (right[:, c:] != 0).to(right.dtype)], 1)

    patch.setattr(HeadDecay, "_mask", broken)


def a_key_finds_itself(patch: pytest.MonkeyPatch) -> None:
    def broken(scores: Tensor) -> Tensor:
        return scores

    patch.setattr(channel_decay, "_not_itself", broken)
    patch.setattr(torch.linalg, "solve_triangular", lambda a, b, **_: torch.linalg.solve(a + b, b))


def scores_not_masked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeadDecay, "_mask", lambda self, rows, k: torch.ones_like(rows[:1, :, :1] @ k[:1, :, :1].mT))


def pairs_do_not_decay(patch: pytest.MonkeyPatch) -> None:
    right = Tree.__init__
    patch.setattr(Tree, "__init__", lambda self, rows, k, total: right(self, rows, k, 0 * total))


def decay_one_step_late(patch: pytest.MonkeyPatch) -> None:
    for kind in (HeadDecay, ChannelDecay):
        right = kind.__init__

        def late(self: Any, log_decay: Any, dtype: torch.dtype, right: Any = right) -> None:
            moved = tuple(x.roll(1, 1) for x in log_decay) if isinstance(log_decay, tuple) else log_decay.roll(1, 1)
            right(self, moved, dtype)

        patch.setattr(kind, "__init__", late)


def second_branch_does_not_decay(patch: pytest.MonkeyPatch) -> None:
    right = ChannelDecay.__init__

    def broken(self: ChannelDecay, log_decay: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        right(self, (log_decay[0], 0 * log_decay[1]), dtype)

    patch.setattr(ChannelDecay, "__init__", broken)


def resets_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tensorformer.ops.linear_attention.segments.first_steps", lambda ids: torch.zeros_like(ids).bool())


def padding_written(patch: pytest.MonkeyPatch) -> None:
    def broken(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, ids: Tensor) -> Any:
        return right(q, k, v, log_decay, beta, ids.clamp_min(0))

    right = segments.masked
    patch.setattr(api, "masked", broken)


def packed(op: laws.Op, x: Operands, **kwargs: Any) -> None:
    laws.packed_documents_are_documents_alone(op, x, [3, 6, 1, 1, 9, 4], **kwargs)


def causal(op: laws.Op, x: Operands, **kwargs: Any) -> None:
    laws.is_causal(op, x, 9, **kwargs)


@pytest.mark.parametrize(
    ("broken", "law", "point"),
    [
        (no_decay_in_what_a_key_finds_in_the_state, laws.equals_the_recurrence, Point(1, "head", "delta")),
        (no_decay_in_what_a_key_finds_in_its_chunk, laws.equals_the_recurrence, Point(2, "head", "delta")),
        (a_key_finds_itself, laws.equals_the_recurrence, Point(2, "channel", "delta")),
        (pairs_do_not_decay, laws.equals_the_recurrence, Point(1, "channel", "additive")),
        (scores_not_masked, causal, Point(2, "none", "delta")),
        (decay_one_step_late, laws.equals_the_recurrence, Point(1, "head", "delta")),
        (decay_one_step_late, laws.equals_the_recurrence, Point(1, "channel", "additive")),
        (second_branch_does_not_decay, laws.equals_the_recurrence, Point(2, "channel", "delta")),
        (resets_forgotten, packed, Point(2, "head", "delta")),
        (resets_forgotten, packed, Point(2, "none", "additive")),
        (padding_written, packed, Point(1, "channel", "delta")),
        (padding_written, laws.padded_rows_are_rows_alone, Point(2, "head", "additive")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_laws_catch(
    broken: Callable[[pytest.MonkeyPatch], None],
    law: Callable[..., None],
    point: Point,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = point.operands(24, state=True)
    with small_tiles():
        law(fast, x, chunk=6)
        x.segments = None
        broken(monkeypatch)
        with pytest.raises((AssertionError, RuntimeError)):
            law(fast, x, chunk=6)


def test_symmetric_decays_would_hide_a_forgotten_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no decay but one that is the same at every step and head, a decay late by a step goes unseen."""
    x = Point(1, "head", "delta").operands(24)
    x.log_decay = torch.full_like(x.v[..., 0], -0.3)
    decay_one_step_late(monkeypatch)
    with small_tiles():
        y = x.call(fast, chunk=6)[0]
    laws.assert_near({"y": y}, {"y": x.call(laws.reference)[0]})
