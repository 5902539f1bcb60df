"""Run a file of tests in a process of its own, where Triton kernels are interpreted on the CPU."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor


def run_tests(file: Path) -> None:
    """Run the tests in ``file`` with Triton's interpreter, which has to be asked for before Triton is imported."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    environment = kept | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # NumPy, which the interpreter computes with, warns of every overflow.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::RuntimeWarning"]
    command = [sys.executable, "-m", "pytest", str(file), *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def assert_within_budget(found: Tensor, reference: Tensor, truth: Tensor, what: str = "") -> None:
    """Allow twice the error of the reference in the same dtype, and as much again as one rounding of the largest."""
    assert found.shape == truth.shape
    assert found.dtype == reference.dtype
    assert found.isfinite().all(), what
    error, usual = ((x.double() - truth).abs().max() for x in (found, reference))
    allowed = 2 * (usual + torch.finfo(found.dtype).eps * truth.abs().max())
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"


def far_apart(count: int) -> list[Tensor]:
    """Return (3, 5) float16 tensors whose stride fits into 32 bits and whose last row's offset does not.

    In memory that is reserved and never filled; they don't overlap.
    """
    apart, no_reserve = 2**30 + 24, 0x4000  # Linux's MAP_NORESERVE, which Python 3.11 does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    space = torch.frombuffer(mmap.mmap(-1, (2 * apart + 8 * count) * 2, flags=flags), dtype=torch.float16)
    return [space.as_strided((3, 5), (apart, 1), 8 * i) for i in range(count)]
