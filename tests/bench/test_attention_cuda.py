"""The GPU benchmark of attention: all but its clock and its scale, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorformer.bench.attention_cuda import run
from tensorformer.errors import ConfigError
from tests.ops.interpreted import run_tests


@pytest.mark.slow
def test_the_benchmark_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("attention_cuda_laws.py"))


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"the benchmark of attention on a GPU needs a CUDA device.*--device cuda"):
        next(run(torch.device("cpu"), rounds=1))
