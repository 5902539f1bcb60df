"""Without values, and compiled: meta and fake tensors, one graph without a break, sizes that change."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tensorformer.ops.act_quant import FORMATS, act_quant, dequantise, fast


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("format", FORMATS)
def test_tensors_without_values(format: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TILE", 100)
    real = act_quant(torch.randn(3, 5, 38), "swiglu", format=format, layout="gate_up")
    made = [act_quant(torch.empty(3, 5, 38, device="meta"), "swiglu", format=format, layout="gate_up", impl=impl)]
    with FakeTensorMode():
        made.append(act_quant(torch.empty(3, 5, 38), "swiglu", format=format, layout="gate_up", impl=impl))
        assert dequantise(*made[-1], format, width=19).shape == (3, 5, 19)
    for result in made:
        for got, expected in zip(result, real, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)


def test_more_than_an_int32_counts() -> None:
    x = torch.empty(2**19, 2 * 2**13, device="meta", dtype=torch.bfloat16)
    codes, scale = act_quant(x, "swiglu", format="int8", group=128, layout="gate_up")
    assert codes.numel() == 2**32
    assert scale.shape == (2**19, 2**6)


GRAPHS = """
import math, sys, torch
from tensorformer.gates import GATES
from tensorformer.ops.act_quant import act_quant, dequantise, quantise

situ = GATES["situ"].bind(beta=4.0, linear_beta=25.0)

def check(backend, gate, format, group):
    def f(x, weight):
        result = act_quant(x, gate, format=format, group=group, layout="gate_up", weight=weight)
        return result, dequantise(*quantise(x, format, group), format, group, width=x.shape[-1])

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for tokens, width in ((6, 126), (9, 70)):
        x, weight = torch.randn(tokens, width), torch.rand(tokens)
        x[1, 3], x[2, 4] = math.nan, math.inf
        (result, back), (expected, there) = compiled(x, weight), f(x, weight)
        assert type(result) is type(expected)
        torch.testing.assert_close(back, there, rtol=1e-6, atol=0, equal_nan=True)
        # Inductor's exp and tanh are others than torch's: a scale may differ in its last bits, a code at a tie.
        a, b = (dequantise(*r, format, group, width=width // 2) for r in (result, expected))
        scales = [r.scale.float() for r in (result, expected)]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0, equal_nan=True)
        assert torch.equal(a.isnan(), b.isnan())
        assert ((a - b).abs() > 1e-5 * b.abs()).sum() <= 2, (format, a, b)

torch.manual_seed(0)
backend, formats = sys.argv[1], sys.argv[2:]
for format in formats:
    for group in (None,) if format in ("mxfp8", "nvfp4") else (None, 20):
        check(backend, situ, format, group)
check(backend, "swiglu", formats[0], None)
print("same")
"""


def compile_in_a_process(backend: str, *formats: str) -> None:
    """Run the script in a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    command = [sys.executable, "-c", GRAPHS, backend, *formats]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_one_graph() -> None:
    compile_in_a_process("aot_eager", "mxfp8")


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    compile_in_a_process("inductor", *(f for f in FORMATS if f != "mxfp8"))
