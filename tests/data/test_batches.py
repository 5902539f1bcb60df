"""Batches are pure, cover an epoch once, and mean the same windows for everyone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.data.batches import Batches, Windows, evaluation_windows, scored_tokens
from tensorformer.errors import DataError


class Source(Protocol):
    def batch(self, step: int) -> Windows: ...


Make = Callable[[np.ndarray, int, int, int], Source]


class StatefulBatches:
    """Broken on purpose: windows come from a generator that remembers how often it was asked."""

    def __init__(self, tokens: np.ndarray, context: int, batch_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._inner = Batches(tokens, context, batch_size, seed)

    def batch(self, step: int) -> Windows:
        return self._inner.batch(int(self._rng.integers(1_000)))


class UnshuffledBatches:
    """Broken on purpose: the same order in every epoch and for every seed."""

    def __init__(self, tokens: np.ndarray, context: int, batch_size: int, seed: int) -> None:
        self._inner = Batches(tokens, context, batch_size, 0)
        self._period = self._inner.windows_per_epoch

    def batch(self, step: int) -> Windows:
        return self._inner.batch(step % self._period)


def check_pure(make: Make, tokens: np.ndarray, context: int, batch_size: int, seed: int) -> None:
    """A step's batch depends on nothing but the arguments: not on the steps asked for before."""
    forward, backward = make(tokens, context, batch_size, seed), make(tokens, context, batch_size, seed)
    steps = range(7)
    expected = [forward.batch(step) for step in steps]
    for step in [*reversed(steps), *steps]:
        for found, wanted in zip(backward.batch(step), expected[step], strict=True):
            assert torch.equal(found, wanted)


def check_shuffled(make: Make) -> None:
    """Seeds and epochs differ in their order, epochs in their cuts too."""
    tokens = ramp(1_001)
    one, other = make(tokens, 10, 99, 0), make(tokens, 10, 99, 1)
    firsts = [one.batch(0)[0][:, 0], one.batch(1)[0][:, 0], other.batch(0)[0][:, 0]]
    assert len({tuple(f.tolist()) for f in firsts}) == 3
    assert len({int(f[0]) % 10 for f in (one.batch(epoch)[0][:, 0] for epoch in range(20))}) > 3


def ramp(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint16)


sizes = st.tuples(st.integers(3, 400), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32)).filter(
    lambda s: s[0] > s[1]
)


@given(sizes)
def test_a_batch_is_a_function_of_seed_and_step(size: tuple[int, int, int, int]) -> None:
    n, context, batch_size, seed = size
    check_pure(Batches, ramp(n), context, batch_size, seed)


def test_state_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_pure(StatefulBatches, ramp(300), 10, 4, 0)


def test_seeds_and_epochs_are_shuffled() -> None:
    check_shuffled(Batches)
    with pytest.raises(AssertionError):
        check_shuffled(UnshuffledBatches)


@given(sizes)
def test_no_token_is_a_target_twice_in_an_epoch(size: tuple[int, int, int, int]) -> None:
    n, context, batch_size, seed = size
    batches = Batches(ramp(n), context, batch_size, seed)
    per_epoch = batches.windows_per_epoch
    steps = -(-2 * per_epoch // batch_size)
    windows = torch.cat([batches.batch(step)[1] for step in range(steps)])
    for epoch in range(2):
        targets = windows[epoch * per_epoch : (epoch + 1) * per_epoch].flatten()
        assert len(targets.unique()) == per_epoch * context
    assert per_epoch * context >= n - 1 - 2 * context or per_epoch == 1


@given(sizes)
def test_targets_are_the_inputs_moved_by_one(size: tuple[int, int, int, int]) -> None:
    n, context, batch_size, seed = size
    inputs, targets = Batches(ramp(n), context, batch_size, seed).batch(3)
    assert inputs.shape == targets.shape == (batch_size, context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert (torch.diff(inputs) == 1).all()


def test_every_token_is_met_in_some_epoch() -> None:
    batches = Batches(ramp(101), 10, 9, 0)
    met = torch.cat([batches.batch(epoch)[0].flatten() for epoch in range(60)])
    assert set(met.tolist()) == set(range(100))


def test_the_order_never_changes() -> None:
    """A run that is continued after an upgrade must meet the same tokens."""
    assert Batches(ramp(100), 5, 6, seed=7).batch(2)[0][:, 0].tolist() == GOLDEN


GOLDEN = [83, 38, 33, 23, 3, 78]


def test_too_little_text() -> None:
    assert Batches(ramp(9), 8, 2, 0).batch(5)[0].tolist() == [list(range(8))] * 2
    with pytest.raises(DataError, match=r"holds 8 tokens and a context of 8 needs 9: shorten train\.context, or add"):
        Batches(ramp(8), 8, 2, 0)
    with pytest.raises(DataError, match=r"context of 32 needs 33: shorten train.context or compare.contexts"):
        evaluation_windows(ramp(32), 8, 100, span=32)
    with pytest.raises(ValueError, match="multiple of the context"):
        evaluation_windows(ramp(99), 8, 100, span=20)
    with pytest.raises(ValueError, match="counted from 0"):
        Batches(ramp(9), 8, 2, 0).batch(-1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 400), st.integers(0, 300))
def test_evaluation_windows(context: int, multiple: int, limit: int, extra: int) -> None:
    span = context * multiple
    tokens = ramp(span + 1 + extra)
    batches = list(evaluation_windows(tokens, context, limit, span))
    targets = torch.cat([targets for _, targets in batches])
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]) + 1, targets)
    assert targets.shape[1] == context
    flat = targets.flatten()
    assert len(flat.unique()) == len(flat)  # nothing is scored twice
    assert len(flat) <= max(limit, span)
    assert len(flat) == scored_tokens(tokens, limit, span)

    longest = torch.cat([targets for _, targets in evaluation_windows(tokens, span, limit, span)])
    assert torch.equal(longest.flatten(), flat)  # the same targets at every context


@pytest.mark.parametrize("context", [64, 4096, 20_000])
def test_a_batch_of_evaluation_grows_with_no_context(context: int) -> None:
    batches = list(evaluation_windows(ramp(60_001), context, 60_000))
    assert all(inputs.numel() <= max(8192, context) for inputs, _ in batches)
    assert sum(inputs.numel() for inputs, _ in batches) == scored_tokens(ramp(60_001), 60_000, context)


def test_evaluation_is_spread_over_the_whole_part() -> None:
    (inputs, _), *_ = evaluation_windows(ramp(10_001), 10, 100)
    assert inputs[:, 0].tolist() == [495 + 1_000 * k for k in range(10)]
