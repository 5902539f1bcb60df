"""The benchmark of experts: it says what it measures, and refuses where laws fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorformer.bench import moe
from tensorformer.ops.grouped_experts import fast


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = moe.Sizes(7, 16, 8, 5, 2)  # grouped_mm takes multiples of 16 bytes only
    monkeypatch.setattr(moe, "COMPARED", (sizes,))
    monkeypatch.setattr(moe, "STAGED", (sizes,))
    monkeypatch.setattr(moe, "TARGETS", {sizes: 1e-9})
    monkeypatch.setattr(moe, "_gemm_rate", lambda *_: 1e9)


@pytest.mark.real
def test_the_lines() -> None:
    lines = list(moe.run(rounds=1))
    both = [line for line in lines if "forward+backward: " in line]
    assert len(both) == 2
    for line in both:
        for name in ("unbind loop", "transformers eager", "batched_mm", "grouped_mm", "ours"):
            assert f"{name} " in line
        assert line.endswith("met 1e-09")
    for gate in moe.GATE_NAMES:
        assert sum(f"{gate}, forward: route " in line for line in lines) == 2
        assert sum(f"{gate}, backward: gather " in line for line in lines) == 2


def test_no_result_where_laws_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fast.backward

    def one_tenth_off(*arguments: Any) -> list[torch.Tensor | None]:
        return [None if grad is None else grad * 1.1 for grad in real(*arguments)]

    monkeypatch.setattr(fast, "backward", one_tenth_off)
    monkeypatch.setattr(moe, "_transformers", lambda *_: {})
    lines = [line for line in moe.run(rounds=1) if "no result" in line]
    assert len(lines) == 2
    assert "dx of ours is 1.0e-01 off" in lines[0]
