"""The GPU benchmark of experts with a clock and a scale of its own: test_moe_cuda.py runs this file in its own
process, where Triton's kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorformer.bench import moe_cuda_stages
from tensorformer.bench.moe import Sizes, layer
from tensorformer.bench.moe_cuda import Scope, run
from tensorformer.gates import GATES
from tensorformer.ops.grouped_experts import triton, triton_launch
from tensorformer.ops.grouped_experts.activation import ready

CPU = torch.device("cpu")
LAYER = Sizes(9, 8, 4, 5, 2)  # grouped_mm takes multiples of 16 bytes
SMALL = Scope(dtype=torch.float32, checked=(Sizes(1, 5, 3, 4, 2), Sizes(19, 7, 6, 3, 2)), timed=(LAYER,))


def once(works: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Run each work, and let it have taken as long as its place."""
    assert (rounds, device) == (3, CPU)
    results = {name: work() for name, work in works.items()}
    if "kernels" in results:
        for result in results.values():
            torch.testing.assert_close(result, results["kernels"], rtol=1e-4, atol=1e-4)
    return {name: (i + 1) * 1e-3 for i, name in enumerate(works)}


def test_every_line() -> None:
    lines = list(run(CPU, 3, SMALL, once))
    assert lines[0].startswith("Triton's interpreter, torch ")
    assert lines[1] == "laws hold for 3 of 3 activations"
    assert lines[3:5] == ["", "9 tokens, d 8, 5 experts of 4, top 2"]
    compared, staged = lines[5:11], lines[11:]
    for i, line in enumerate(compared):
        gate, way = SMALL.gates[i // 2], ("forward", "forward+backward")[i % 2]
        rate = LAYER.flops * (1, 3)[i % 2] / 1e-3 / 1e12
        assert line == (
            f"  {gate}, {way}: kernels 1.000 ms ({rate:.3g} TFLOP/s), sorted in torch 2.000 ms (2.00×),"
            " grouped_mm 3.000 ms (3.00×), unbind loop 4.000 ms (4.00×)"
        )
    for i, gate in enumerate(SMALL.gates):
        took, whole = 5 + i, 15 + i
        assert staged[i] == (
            f"  {gate}, forward, launch by launch: route 1.000 ms ({1 / whole:.0%}), sort 2.000 ms ({2 / whole:.0%}),"
            f" second products 3.000 ms ({3 / whole:.0%}), combine 4.000 ms ({4 / whole:.0%}),"
            f" first products and activation {took:.3f} ms ({took / whole:.0%})"
        )
        assert staged[3 + i].startswith(f"  {gate}, backward, launch by launch: weights of the second 1.000 ms")
        assert f"dh and activation {took:.3f} ms" in staged[3 + i]
    against = "products with the activation behind them, against bilinear: bilinear 1.000, swiglu 1.200, situ 1.400"
    assert staged[6:] == [
        f"  forward, {against}",
        f"  backward, {against}",
        "  forward, the activation as passes of its own, against the first products by grouped_mm:"
        " bilinear 2.000, swiglu 3.000, situ 4.000",
    ]


def test_the_launches_are_those_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed alone is all that forward and backward launch, in the same sizes."""
    seen: list[Any] = []
    right = triton_launch._launch

    def recorded(kernel: Any, programs: int, *rest: Any) -> None:
        seen.append((kernel, programs))
        right(kernel, programs, *rest)

    monkeypatch.setattr(triton_launch, "_launch", recorded)
    made, gate = layer(LAYER, torch.float32, "cpu"), GATES["swiglu"]
    for forward in (True, False):
        stages = moe_cuda_stages.forward_stages(made, LAYER, [gate]) if forward else None
        stages = stages or moe_cuda_stages.backward_stages(made, [gate])
        seen.clear()
        for named in stages.values():
            for work in named.values():
                work()
        alone = sorted(map(repr, seen))
        operands, rows, _ = moe_cuda_stages._sorted(made)
        activation = ready(gate, "gate_up")
        seen.clear()
        _, kept = triton.forward(operands, rows, activation, keep=True)
        if not forward:
            seen.clear()
            assert kept is not None
            triton.backward(operands, rows, activation, kept, made.dy, (True,) * 4 + (False,) * 2)
        assert sorted(map(repr, seen)) == alone


def timed_as_one(works: Mapping[str, Callable[[], object]], *_: object) -> dict[str, float]:
    for work in works.values():
        work()
    return dict.fromkeys(works, 1.0)


def test_an_activation_whose_laws_fail_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_launch.gradients

    def broken(*given: Any, **named: Any) -> Any:
        found = right(*given, **named)
        if given[5].gate.name == "swiglu":
            given[7].mul_(1.001)
        return found

    monkeypatch.setattr(triton_launch, "gradients", broken)
    lines = list(run(CPU, 3, SMALL, timed_as_one))
    assert any(line.startswith("swiglu: no result: dx in torch.float32, 19 tokens") for line in lines)
    assert "laws hold for 2 of 3 activations" in lines
    assert not [line for line in lines if "swiglu" in line and "no result" not in line]
    assert any("situ, forward+backward: kernels" in line for line in lines)


def test_who_computes_something_else_or_nothing_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = replace(SMALL, gates=("bilinear",))
    right = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: right(x, w, offs=offs) * 1.01)
    lines = list(run(CPU, 3, scope, timed_as_one))
    assert any(line.startswith("  bilinear, grouped_mm: no result: y is ") for line in lines)
    assert not any("grouped_mm 1000" in line for line in lines)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("not on this\n GPU")

    monkeypatch.setattr(F, "grouped_mm", missing)
    lines = list(run(CPU, 3, scope, timed_as_one))
    assert "  bilinear, grouped_mm: no result: not on this GPU" in lines
    assert lines[-1] == "  grouped_mm: no result: not on this GPU"
    assert any("unbind loop 1000" in line for line in lines)
