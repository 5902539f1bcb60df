"""The GPU benchmark with a clock that runs each work once: test_gates_cuda.py runs this file in its own process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorformer.bench import gates_cuda
from tensorformer.bench.gates_cuda import Sizes, run
from tensorformer.ops.act_and_mul import triton
from tensorformer.ops.gated_linear import triton as linear_triton

CPU = torch.device("cpu")
SMALL = Sizes(
    checked=("bilinear", "swiglu", "situ"),
    timed=("bilinear", "swiglu"),
    dtypes=(torch.bfloat16,),  # of which the laws are tried in float32 first
    linear_dtype=torch.float32,
    rows=((20, 700),),
    experts=((24, 9),),
    tokens=(2, 5),
)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)


def once(works: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Run each work, which must agree with the others of its gate, and let it have taken as long as its place."""
    assert (rounds, device) == (3, CPU)
    results = {name: work() for name, work in works.items()}
    for gate in {name.rpartition(" ")[2] for name in works} & {*SMALL.checked}:
        alike = [r for name, r in results.items() if name.endswith(f" {gate}")]
        for result in alike:
            torch.testing.assert_close(result, alike[0], rtol=1e-5, atol=1e-5)
    if "eager" in results:
        for result in results.values():
            torch.testing.assert_close(result, results["eager"], rtol=2e-2, atol=2e-2)
    return {name: (i + 1) * 1e-6 for i, name in enumerate(works)}


def test_every_line() -> None:
    lines = list(run(CPU, 3, SMALL, once))
    assert lines[0].startswith("Triton's interpreter, torch ")
    assert lines[1] == "laws hold for 3 of 3 gates"
    # A copy of [20, 2·700] reads and writes 112,000 bytes, in a microsecond by this clock.
    assert lines[2] == "[20, 2·700] torch.bfloat16: a copy 112 GB/s"
    for i, name in enumerate(("bilinear", "swiglu")):
        for j, direction in enumerate(("forward", "forward+backward")):
            line = lines[3 + 2 * i + j]
            assert line.startswith(f"  {name} {direction}: triton ")
            # Three quarters of the bytes that a copy moves, or twice them, in one, two and three microseconds.
            shares = [int(s) for s in re.findall(r"\((\d+)% of the copy\)", line)]
            assert shares == ([75, 38, 25] if direction == "forward" else [200, 100, 67])
    fused = lines[7:]
    assert [line.partition(":")[0] for line in fused[::2]] == [f"d_model 24, d_ff 9, {n} tokens" for n in (2, 5)]
    for line in fused[::2]:
        assert "products alone 1.0 µs, fused bilinear 2.0 µs, torch bilinear 3.0 µs, torch+triton bilinear 4.0" in line
    assert fused[1::2] == ["  fused, against bilinear: bilinear 1.000, swiglu 2.500, situ 4.000"] * 2


def timed_as_one(works: Mapping[str, Callable[[], object]], *_: object) -> dict[str, float]:
    return dict.fromkeys(works, 1.0)


def test_a_gate_whose_laws_fail_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton.backward

    def broken(gate: Any, g: Any, u: Any, dh: Any, dg: Any, du: Any) -> None:
        right(gate, g, u, dh * 1.0001 if gate.name == "swiglu" else dh, dg, du)

    monkeypatch.setattr(triton, "backward", broken)
    lines = list(run(CPU, 3, replace(SMALL, checked=("swiglu", "bilinear")), timed_as_one))
    assert any(line.startswith("swiglu: no result: act_and_mul in torch.bfloat16: around zero") for line in lines)
    assert "laws hold for 1 of 2 gates" in lines
    assert not [line for line in lines if "swiglu" in line and "no result" not in line]
    assert any("fused bilinear" in line for line in lines)


def test_a_fused_kernel_that_is_wrong_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear_triton.forward
    monkeypatch.setattr(gates_cuda, "violations", lambda *_, **__: [])
    monkeypatch.setattr(linear_triton, "forward", lambda gate, x, a, b: right(gate, x, b, a))
    lines = list(run(CPU, 3, SMALL, timed_as_one))
    assert any(line.startswith("situ: no result: gated_linear in torch.float32, 65 tokens") for line in lines)
    assert "laws hold for 1 of 3 gates" in lines  # a bilinear gate doesn't mind
    assert not [line for line in lines if "fused situ" in line]
