"""Running a configuration in a test, and telling whether two runs are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tensorformer.config.schema import Run
from tensorformer.data.prepare import prepare
from tensorformer.files import sha256
from tensorformer.lab import checkpoint, record
from tensorformer.lab.train import train

CPU = torch.device("cpu")


def run_it(run: Run, folder: Path, **options: Any) -> record.Result:
    return train(run, folder, prepare(run.data), CPU, **options)


def same_bits(a: Path, b: Path) -> None:
    """Fail unless two finished runs have the same metrics, weights, biases and moments, bit for bit."""
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    last_a, last_b = checkpoint.latest(a), checkpoint.latest(b)
    assert last_a is not None
    assert last_b is not None
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZERS):
        assert sha256(last_a / name) == sha256(last_b / name), name
