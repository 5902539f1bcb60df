"""The GPU benchmark of experts: all but its clock and its scale, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorformer.bench.moe_cuda import Scope, run
from tensorformer.errors import ConfigError
from tests.ops.interpreted import run_tests


@pytest.mark.slow
def test_the_benchmark_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("moe_cuda_laws.py"))


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"the benchmark of experts on a GPU needs a CUDA device.*--device cuda"):
        next(run(torch.device("cpu"), rounds=1))


def test_what_is_measured_is_fine_and_coarse_and_fits_into_memory() -> None:
    fine = [s for s in Scope().timed if 64 <= s.experts <= 256 and 32 <= s.d_ff <= 256]
    assert len(fine) >= 4
    assert any(s.d_ff >= 4096 for s in Scope().timed)
    for sizes in Scope().timed:
        weights = 3 * sizes.experts * sizes.d * sizes.d_ff
        rows = sizes.tokens * sizes.top_k * (2 * sizes.d + 6 * sizes.d_ff)
        assert 2 * (4 * weights + 3 * rows) < 16e9  # bytes, with gradients, of what is alive at a time
