"""The benchmark of experts: it says what it measures, and refuses where laws fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tensorformer.bench import moe
from tensorformer.errors import ConfigError
from tensorformer.ops.grouped_experts import fast, native


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_BUILT", {})
    sizes = moe.Sizes(7, 16, 8, 5, 2)  # grouped_mm takes multiples of 16 bytes only
    monkeypatch.setattr(moe, "COMPARED", (sizes,))
    monkeypatch.setattr(moe, "STAGED", (sizes,))
    monkeypatch.setattr(moe, "TARGETS", {(sizes, "ours"): 1e-9, (sizes, "native"): 1e9})
    monkeypatch.setattr(moe, "_gemm_rate", lambda *_: 1e9)


@pytest.mark.real
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="native experts multiply by MKL")
def test_the_lines() -> None:
    lines = list(moe.run(rounds=1))
    both = [line for line in lines if "forward+backward: " in line]
    assert len(both) == 2
    for line in both:
        for name in ("unbind loop", "transformers eager", "batched_mm", "grouped_mm", "ours", "native"):
            assert f"{name} " in line
        assert "met 1e-09)" in line
        assert line.endswith("short of 1000000000.0)")
    for gate in moe.GATE_NAMES:
        assert sum(f"{gate}, forward: route " in line for line in lines) == 2
        assert sum(f"{gate}, backward: gather " in line for line in lines) == 2


def no_compiler(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError("no compiler")


def test_no_result_where_laws_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fast.backward

    def one_tenth_off(*arguments: Any) -> list[torch.Tensor | None]:
        return [None if grad is None else grad * 1.1 for grad in real(*arguments)]

    monkeypatch.setattr(fast, "backward", one_tenth_off)
    monkeypatch.setattr(moe, "_transformers", lambda *_: {})
    monkeypatch.setattr(moe, "resolve", no_compiler)
    lines = list(moe.run(rounds=1))
    refused = [line for line in lines if "no result" in line]
    assert len(refused) == 2
    assert "dx of ours is 1.0e-01 off" in refused[0]
    assert sum("without native: no compiler" in line for line in lines) == 2
