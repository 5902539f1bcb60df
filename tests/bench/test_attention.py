"""The benchmark of linear attention: what it says, what it is held to, and that a wrong operator has no figure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tensorformer.bench import attention, attention_points
from tensorformer.bench.attention import BILINEAR, OTHERS, Sizes, run
from tensorformer.bench.attention_memory import extra_memory
from tensorformer.bench.attention_points import Point, violations
from tensorformer.lab.device import PROC

SMALL = Sizes(trained=(5, 1024), forward=(7,), others=(3,), memory_forward=11, memory=(2, 4), contexts=(1, 8192))


def once(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run each call, and let it have taken a second, or three of softmax attention."""
    assert rounds == 2
    for call in calls.values():
        call()
    return {name: 3.0 if name.startswith("softmax") else 1.0 for name in calls}


def memory(point: Point, time: int, backward: bool) -> int:
    assert point == BILINEAR
    return (10 if backward else 9) * 10**6 * time


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "violations", lambda *_: iter(()))


@pytest.mark.usefixtures("sound")
def test_every_line() -> None:
    lines = list(run(2, SMALL, once, memory))
    assert lines[1] == "× is the time of softmax attention (8 heads of 64) divided by ours"
    start = "float32 bilinear (8 heads of 16×16→64)"
    assert lines[2:7] == [
        f"{start}, forward, 5 tokens: 1000.00 ms, softmax 3000.00 ms, 3.00×",
        f"{start}, forward+backward, 5 tokens: 1000.00 ms, softmax 3000.00 ms, 3.00×",
        f"{start}, forward, 1,024 tokens: 1000.00 ms, softmax 3000.00 ms, 3.00×",
        f"{start}, forward+backward, 1,024 tokens: 1000.00 ms, softmax 3000.00 ms, 3.00× (target: 1.6 or more; met)",
        f"{start}, forward, 7 tokens: 1000.00 ms, softmax 3000.00 ms, 3.00×",
    ]
    for point, line in zip(OTHERS, lines[7:12], strict=True):
        assert line.startswith(f"float32 {point.name} (4 heads of 128→128), forward+backward, 3 tokens: 1000.00 ms")
    assert lines[12:17] == [
        f"{start}, forward, 11 tokens: 99 MB beside the operands (target: at most 80; missed)",
        f"{start}, forward+backward, beside the operands: 2 tokens 20 MB (10,000,000 bytes a token) · "
        "4 tokens 40 MB (10,000,000 bytes a token)",
        f"{start}, a token of 32 more after 1: 31250.0 µs, softmax 93750.0 µs, 3.00×",
        f"{start}, a token of 32 more after 8,192: 31250.0 µs, softmax 93750.0 µs, 3.00×"
        " (target: 15.0 or more; missed)",
        f"{start}, a token after 8,192 takes 1.00 times one after 1, with no softmax cache in between"
        " (target: at most 1.2; met)",
    ]
    assert [line for line in lines[17:] if not re.match(r"bf16 \w+ \(\d heads of .*, forward", line)] == []
    assert len(lines) == 17 + 10
    assert not any("target" in line for line in lines[17:])


@pytest.mark.usefixtures("sound")
def test_memory_that_cannot_be_measured() -> None:
    lines = list(run(2, SMALL, once, lambda *_: 0))
    assert sum("not measured" in line for line in lines) == 1
    assert not any("MB" in line for line in lines)


def _off(change: Callable[[torch.Tensor], torch.Tensor], where: int) -> Callable[..., Any]:
    """Return the operator with one of its two results changed."""
    right = attention_points.linear_attention

    def wrong(*args: Any, impl: str = "auto", **switches: Any) -> tuple[Any, ...]:
        results = list(right(*args, impl=impl, **switches))
        result = results[where]
        if impl == "auto" and result is not None:
            results[where] = change(result)
        return tuple(results)

    return wrong


class _ScaledGradient(torch.autograd.Function):
    """The right output with a gradient that is a hundred-thousandth too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * (1 + 1e-5)


@pytest.mark.parametrize(
    ("wrong", "where", "words"),
    [
        (lambda y: y * (1 + 1e-5), 0, "output is off"),
        (lambda s: s * (1 + 1e-5), 1, "a token more is off"),
        (_ScaledGradient.apply, 0, "gradient 0 is off"),
        (lambda y: y * torch.nan, 0, "output is off by nan"),
    ],
)
def test_a_wrong_operator_breaks_a_law(
    wrong: Callable[..., Any], where: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_points, "_TIME", 9)
    point = Point("gdn", 2, (3,), 5, "head", "delta")
    assert not list(violations(point, torch.float32))
    monkeypatch.setattr(attention_points, "linear_attention", _off(wrong, where))
    assert next(violations(point, torch.float32)).startswith(words)


@pytest.mark.parametrize("point", [BILINEAR, *OTHERS], ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", attention.DTYPES.values(), ids=str)
def test_every_point_holds_its_laws(point: Point, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_points, "_TIME", 130)
    assert not list(violations(point, dtype))


def test_a_point_that_breaks_its_laws_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "violations", lambda p, _: iter(["output is off"] if p == BILINEAR else []))
    lines = list(run(2, SMALL, once, memory))
    named = [line for line in lines if "bilinear" in line]
    assert named == [f"{dtype} {BILINEAR}: no result: output is off" for dtype in ("float32", "bf16")]
    assert sum("gdn" in line for line in lines) == 2


def test_the_laws_leave_the_random_numbers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_points, "_TIME", 3)
    before = torch.get_rng_state()
    list(violations(OTHERS[0], torch.float32))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.skipif(not PROC.exists(), reason="no mark of the peak here")
def test_memory_counts_what_a_call_makes() -> None:
    point = Point("bilinear", 8, (16, 16), 64)
    output = 4096 * 8 * 64 * 4
    forward, both = extra_memory(point, 4096, False), extra_memory(point, 4096, True)
    assert output < forward < 40e6
    assert forward < both < 90e6
