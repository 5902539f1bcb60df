"""The Triton kernel: its laws under the interpreter, what it becomes on an H100, and when it is taken."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.ops.act_quant import FORMATS, api, resolve, triton
from tests.ops.interpreted import run_tests

GIVEN: dict[str, Any] = {"format": "int8", "layout": "gate_up"}


def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("triton_laws.py"))


def compiled(gate: Gate, format: str, *, swept: bool = False, dtype: str = "bf16") -> str:
    """Return the kernel's PTX for sm_90, for halves of aligned tokens and a weight."""
    pytest.importorskip("triton")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tensorformer.ops.triton_kernel import OPTIONS, gate_text

    spec, text = FORMATS[format], gate_text(gate)
    kernel = triton.kernel(gate, spec, weighted=True, swept=swept)
    lanes = spec.group or triton.TILE
    fixed = {f"given_{n}_column": 1 for n in ("g", "u", *text.tensors)}
    fixed |= {"ROWS": 1, "GROUPS": triton.TILE // lanes, "LANES": lanes}
    whole = {"codes_pointer": "*i8" if format == "int8" else "*u8", "whole_pointer": "*fp32"}
    whole["scale_pointer"] = "*fp32" if spec.scale == torch.float32 else "*u8"
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name.removeprefix("given_") in text.numbers:
            signature[name] = "fp32"
        else:
            signature[name] = whole.get(name, f"*{dtype}") if name.endswith("_pointer") else "i32"
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={**OPTIONS, "num_warps": 4}).asm["ptx"]


@pytest.mark.parametrize(
    ("format", "swept"), [(f, s) for f, spec in FORMATS.items() for s in (False, True) if not (s and spec.group)]
)
def test_a_bilinear_cast_has_no_exponential(format: str, swept: bool) -> None:
    from tests.ops.triton_ptx import divisions, exponentials

    text = compiled(GATES["bilinear"], format, swept=swept)
    assert exponentials(text) == []
    # Eight numbers a thread and their scale, each rounded as it should be; a power of two needs none.
    assert set(divisions(text)) <= {"div.rn.f32"}
    assert len(divisions(text)) == {"mxfp8": 0, "nvfp4": 4}.get(format, 9)
    assert ".local" not in text


@pytest.mark.parametrize("format", FORMATS)
def test_other_gates_have_theirs(format: str) -> None:
    from tests.ops.triton_ptx import exponentials

    assert len(exponentials(compiled(GATES["swiglu"], format))) == 8
    assert len(exponentials(compiled(example(GATES["situ"]), format))) > 8


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_memory_is_read_and_written_in_whole_vectors(dtype: str) -> None:
    for format in ("int8", "mxfp8", "nvfp4"):
        text = compiled(GATES["swiglu"], format, dtype=dtype)
        assert len(re.findall(r"ld\.global\.v4", text)) == (4 if dtype == "fp32" else 2)
        scale = "st.global.b32" if format == "int8" else "st.global.b8"
        # Eight codes a thread, at once: eight bytes, or four.
        codes = "st.global.b32" if format == "nvfp4" else "st.global.v2.b32"
        assert sorted(re.findall(r"st\.global\S*", text)) == sorted((scale, codes))


def test_parameters_that_are_tensors_compile() -> None:
    assert "ex2" in compiled(GATES["situ"].bind(beta=torch.ones(8), linear_beta=3.0), "int8")


def test_where_it_cannot_run_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device in ("cpu", "meta"):
        with pytest.raises(ConfigError, match='impl "triton" of act_quant needs a CUDA device') as caught:
            resolve(torch.empty(4, 12, device=device), "swiglu", impl="triton", **GIVEN)
        assert "\n" not in str(caught.value)


class _OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # pyright: ignore[reportAssignmentType]


def test_a_gpu_takes_it_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    x = torch.randn(4, 12).as_subclass(_OnCuda)
    runs = inspect.unwrap(resolve)
    assert runs(x, "swiglu", **GIVEN) == "reference"  # a subclass, whatever it is
    monkeypatch.setattr(api, "Tensor", _OnCuda)
    for capability, expected in (((7, 5), "reference"), ((8, 0), "triton"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert runs(x, "swiglu", **GIVEN) == expected
        assert runs(x, "swiglu", impl="reference", **GIVEN) == "reference"
    assert runs(x.double(), "swiglu", **GIVEN) == "reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.0"):
        runs(x, "swiglu", impl="triton", **GIVEN)


def test_a_compiled_graph_has_the_formula_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ConfigError, match=r'is not for torch.compile or torch.func: write impl="auto"'):
        resolve(torch.randn(4, 12), "swiglu", impl="triton", **GIVEN)


def test_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from tensorformer.ops.act_quant import act_quant, resolve;"
        "act_quant(torch.ones(2, 6), 'swiglu', format='int8', layout='gate_up'); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
