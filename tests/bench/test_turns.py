"""The timing of several calls in turn: what it calls, how often, and in which order."""

from __future__ import annotations

import pytest

from tensorformer.bench import turns


def test_every_round_times_all_of_them_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    found = turns.medians({"a": lambda: call("a", 1.0), "b": lambda: call("b", 3.0)}, rounds=3, warm_ups=0)
    assert found == {"a": 1.0, "b": 3.0}
    assert "".join(order[2:]) == "baabba"


def test_short_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]

    def call() -> None:
        calls[0] += 1
        clock[0] += turns.LEAST_SECONDS / 10

    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    assert turns.medians({"a": call}, rounds=1, warm_ups=0)["a"] == pytest.approx(turns.LEAST_SECONDS / 10)
    assert calls[0] == 1 + 10


def test_copy_rate() -> None:
    turns.keep_memory()
    assert turns.copy_rate(megabytes=1, rounds=3) > 1e7
