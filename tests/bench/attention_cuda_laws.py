"""The GPU benchmark of attention with a clock and a scale of its own: test_attention_cuda.py runs this file in its
own process, where Triton's kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tensorformer.bench.attention_cuda import Sizes, run
from tensorformer.bench.attention_points import Point
from tensorformer.ops.linear_attention.triton_launch import Launches

CPU = torch.device("cpu")
SMALL = Sizes(
    points=(Point("plain", 1, (3,), 4), Point("decayed", 1, (2, 3), 4, "head")),
    dtypes=(torch.float32,),
    checked=(1, 19),
    timed=(18,),
)
RESULTS: dict[str, Any] = {}


def once(works: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Run each work, and let it have taken as long as its place; the kernels agree with torch."""
    assert (rounds, device) == (3, CPU)
    for name, work in works.items():
        RESULTS[name] = work()
    for name in works:
        if name.startswith("triton "):
            theirs = RESULTS[name.replace("triton", "fast")]
            for a, b in zip(RESULTS[name], theirs, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return {name: (i + 1) * 1e-3 for i, name in enumerate(works)}


def weigh(work: Callable[[], object], device: torch.device) -> int:
    return 2_500_000


def test_every_line() -> None:
    lines = list(run(CPU, 3, SMALL, once, weigh))
    assert lines[0].startswith("Triton's interpreter, torch ")
    assert "softmax attention (8 heads of 64)" in lines[1]
    assert lines[2] == "laws hold for 2 of 2 points in torch.float32"
    assert lines[3] == (
        "plain (1 heads of 3→4) in torch.float32, forward, 18 tokens: 2.000 ms and 2.5 MB,"
        " in torch 3.000 ms and 2.5 MB, softmax 1.000 ms and 2.5 MB, 0.50×"
    )
    assert [line.partition(":")[0].rpartition(" in ")[2] for line in lines[4:]] == [
        "torch.float32, forward, 18 tokens",
        "torch.float32, forward+backward, 18 tokens",
        "torch.float32, forward+backward, 18 tokens",
    ]


def test_a_point_whose_laws_fail_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Launches.advance

    def forgetful(self: Launches, *given: Any) -> None:
        right(self, *given)
        if self.exponents is not None:
            given[0].mul_(0.999)

    monkeypatch.setattr(Launches, "advance", forgetful)
    lines = list(run(CPU, 3, SMALL, once, weigh))
    assert any(line.startswith("decayed (1 heads of 2×3→4) in torch.float32: no result: final state") for line in lines)
    assert "laws hold for 1 of 2 points in torch.float32" in lines
    assert not [line for line in lines if "decayed" in line and "no result" not in line]
    assert any(line.startswith("plain") and "forward+backward" in line for line in lines)
