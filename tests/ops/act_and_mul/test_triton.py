"""The Triton kernels: their laws under the interpreter, what they become on an H100, and why they can't run here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

from tensorformer.gates import GATES, Gate, Scalar, expr
from tensorformer.gates.examples import example
from tensorformer.ops.act_and_mul.triton import why_not
from tests.ops.interpreted import run_tests

CPU = torch.device("cpu")
OUTPUTS = [("h",), ("dg", "du")]


def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("triton_laws.py"))


def compiled(gate: Gate, outputs: tuple[str, ...], constants: dict[str, int] | None = None, dtype: str = "bf16") -> str:
    """Return the PTX of the kernel of ``gate`` that writes ``outputs``."""
    pytest.importorskip("triton")
    from tensorformer.ops.act_and_mul import triton
    from tensorformer.ops.triton_kernel import gate_text
    from tests.ops.triton_ptx import ptx

    numbers = gate_text(gate, "h" not in outputs).numbers
    tile = {"HEIGHT": 1, "WIDTH": triton.TILE}
    return ptx(triton.kernel(gate, outputs), numbers, tile | (constants or {}), dtype=dtype)


def needs(gate: Gate, backward: bool) -> tuple[bool, bool]:
    """Say whether the formula, spelled out in elementary functions, has an exponential or a logarithm, and whether
    it divides by something that is not a number."""
    scalars = (gate.gate, gate.value)
    formulas = [s.expr for s in scalars] + [s.derivative_expr for s in scalars] * backward
    elementary = [f.doit() for f in formulas]
    exponential = any(f.has(sympy.exp, sympy.log, sympy.tanh, expr.erfc) for f in elementary)
    powers = [p for f in formulas for p in f.atoms(sympy.Pow)]
    return exponential, exponential or any(not p.is_number and p.exp.is_negative for p in powers)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", sorted(GATES))
def test_no_exponential_and_no_division_that_the_formula_lacks(name: str, outputs: tuple[str, ...]) -> None:
    from tests.ops.triton_ptx import divisions, exponentials

    gate = example(GATES[name])
    text = compiled(gate, outputs)
    exponential, division = needs(gate, "h" not in outputs)
    assert bool(exponentials(text)) == exponential
    assert division or not divisions(text)
    assert ".local" not in text


def test_which_gates_are_cheap() -> None:
    """What the law above must have found, for the gates whose cost is argued about."""
    for name in (
        "bilinear",
        "reglu",
        "relu2_glu",
        "fatreglu",
        "hard_sigmoid_glu",
        "hard_swish_glu",
        "bilinear_clamped",
    ):
        assert needs(example(GATES[name]), backward=True) == (False, False)
    for name in ("swiglu", "geglu", "geglu_tanh", "situ", "swiglu_clamped"):
        assert needs(example(GATES[name]), backward=False) == (True, True)


def test_an_exponential_and_a_division_are_seen() -> None:
    from tests.ops.triton_ptx import divisions, exponentials

    for outputs in OUTPUTS:
        text = compiled(GATES["swiglu"], outputs)
        assert (len(exponentials(text)), len(divisions(text))) == (8, 8)  # one of each a number, eight a thread
    one = Scalar("one", "x/(1 + x**2)", ("0", "0"), "here")
    text = compiled(Gate("rational", one, one, "here"), ("h",))
    assert (len(exponentials(text)), len(divisions(text))) == (0, 16)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_memory_is_read_and_written_in_whole_vectors(dtype: str) -> None:
    for outputs in OUTPUTS:
        text = compiled(GATES["swiglu"], outputs, dtype=dtype)
        assert set(re.findall(r"ld\.global\S*", text)) == {"ld.global.v4.b32"}
        assert set(re.findall(r"st\.global\S*", text)) == {"st.global.v4.b32"}


def test_interleaved_halves_are_read_one_by_one_and_one_gradient_is_written() -> None:
    columns = {"g_column": 2, "u_column": 2, "dh_column": 1, "dg_column": 1}
    text = compiled(GATES["swiglu"], ("dg",), {"HEIGHT": 4, "WIDTH": 256, **columns})
    assert len(re.findall(r"ld\.global\.b16", text)) == 16  # eight of each half a thread
    assert len(re.findall(r"ld\.global\.v4", text)) == len(re.findall(r"st\.global\.v4", text)) == 1


def test_parameters_that_are_tensors_compile() -> None:
    gate = GATES["situ"].bind(beta=torch.ones(8), linear_beta=3.0)
    assert "ex2" in compiled(gate, ("dg", "du"))


def test_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    swiglu = GATES["swiglu"]
    here = "needs a CUDA device, or TRITON_INTERPRET=1 set before the process starts"
    assert why_not(swiglu, torch.float32, CPU) == here
    assert why_not(swiglu, torch.float32, torch.device("meta")) == here
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # too late: Triton may be imported already, as compiled above
    compiled(swiglu, ("h",))
    assert why_not(swiglu, torch.float32, CPU) == here
    for dtype in (torch.float64, torch.float8_e4m3fn):
        assert f"too little for {dtype}: write impl='reference'" in str(why_not(swiglu, dtype, CPU))


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    for capability, expected in (((7, 5), "needs a GPU of compute capability 8.0 or more"), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert why_not(GATES["swiglu"], torch.bfloat16, cuda) == expected


def test_a_function_triton_has_no_form_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    class wobble(expr.Primitive):
        pattern = r"\mathrm{{wobble}}\left({0}\right)"

        @staticmethod
        def slopes(z: Any) -> tuple[Any, ...]:
            return (wobble(z),)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(expr._NAMES, "wobble", wobble)
    odd = Scalar("odd", "wobble(x)", ("0", "0"), "here")
    reason = why_not(Gate("odd", odd, odd, "here"), torch.bfloat16, torch.device("cuda"))
    assert reason is not None
    assert "no Triton form of 'wobble'" in reason


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert why_not(GATES["swiglu"], torch.float32, CPU) == "needs Triton: pip install 'tensorformer[gpu]'"


def test_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from tensorformer.gates import GATES; from tensorformer.ops.act_and_mul import triton;"
        "triton.why_not(GATES['swiglu'], torch.float32, torch.device('cpu')); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
