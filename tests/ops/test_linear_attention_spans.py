"""Spans of chunks: they cover the steps, each keeps one state, and a state carried wrongly between chunks is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.ops.linear_attention import linear_attention, one_span, plan
from tensorformer.ops.linear_attention.general import Inputs
from tests.ops import linear_attention_laws as laws
from tests.ops.linear_attention_laws import POINTS, Point, small_tiles


@given(st.integers(0, 2000), st.integers(1, 700))
def test_spans_cover_the_steps_and_each_keeps_a_state(time: int, chunk: int) -> None:
    cuts = plan.spans(time, chunk)
    steps = [step for cut in cuts for step in range(cut.start, cut.stop)]
    assert steps == list(range(time))
    assert all(cut.chunk == chunk for cut in cuts[:-1])
    assert all(cut.chunks * cut.chunk <= max(chunk, plan.SPAN * plan.BLOCK) for cut in cuts)
    x = torch.zeros(2, time, 3, 5)
    inputs = Inputs((x,), (x,), x, (), x[..., 0])
    assert inputs.kept_shape(chunk) == (len(cuts), 2, 3, 5, 5)


@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("chunk", [None, 3])
def test_many_spans_equal_the_recurrence(point: Point, chunk: int | None) -> None:
    for state in (False, True):
        with small_tiles():
            laws.equals_the_recurrence(linear_attention, point.operands(71, state=state, batch=1, heads=2), chunk=chunk)


@pytest.mark.parametrize("point", [p for p in POINTS if p.update == "delta" or p.decay == "channel"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_budget_over_spans(point: Point, dtype: torch.dtype) -> None:
    dims = (16,) if point.degree == 1 else (8, 6)
    x = point.operands(2 * plan.SPAN * plan.BLOCK + 7, key_dims=dims, state=True, batch=1, heads=1, value=8)
    laws.keeps_the_error_budget(linear_attention, x, dtype)


def late(right: Any) -> Any:
    """Every chunk is taken to have started from the state of the one before it."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        return found._replace(states=[found.states[0], *found.states[:-1]])

    return broken


def forgotten(right: Any) -> Any:
    """The gradient of the state is handed on without what queries and keys of the chunk add to it."""

    def broken(x: Any, ready: Any, dy: Tensor, ds: Tensor) -> Any:
        d_states, du, d_met = right(x, ready, dy, ds)
        return [ds, *d_states[1:]], du, d_met

    return broken


@pytest.mark.parametrize(("name", "breaking"), [("_carry", late), ("_carry_back", forgotten)])
def test_the_laws_catch_a_state_carried_wrongly(name: str, breaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = Point(1, "head", "delta").operands(40, state=True)
    with small_tiles():
        laws.equals_the_recurrence(linear_attention, x)
        monkeypatch.setattr(one_span, name, breaking(getattr(one_span, name)))
        with pytest.raises(AssertionError):
            laws.equals_the_recurrence(linear_attention, x)
