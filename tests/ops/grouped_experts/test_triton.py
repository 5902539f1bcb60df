"""The Triton kernels of experts: their laws under the interpreter, what they become on an H100, when they are taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.examples import example
from tensorformer.ops.grouped_experts import resolve, triton, triton_launch
from tensorformer.ops.grouped_experts.check import Operands
from tests.ops.grouped_experts.expert_laws import Case, call, draw
from tests.ops.interpreted import run_tests


@pytest.mark.slow
def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("triton_laws.py"))


# What they become


def compiled(kernel: Any, numbers: tuple[str, ...], constants: dict[str, Any], dtype: str, warps: int) -> str:
    """Return a kernel's PTX for sm_90; operands are contiguous, and their strides multiples of 16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tensorformer.ops.triton_kernel import OPTIONS

    kinds = dict.fromkeys(("tile_pointer", "token_pointer", "order_pointer", "begin_pointer"), "*i64")
    kinds |= dict.fromkeys(("share_pointer", "d_share_pointer"), "*fp32")
    fixed = {n: 1 for n in kernel.arg_names if n.endswith("_column")} | {"PRECISION": "ieee"} | constants
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name in numbers:
            signature[name] = "fp32"
        else:
            signature[name] = kinds.get(name, f"*{dtype}") if name.endswith("_pointer") else "i32"
            aligned[(i,)] = [["tt.divisibility", 16]]
    options = {**OPTIONS, "num_warps": warps, "num_stages": triton_launch.STAGES}
    return compile(ASTSource(kernel, signature, fixed, aligned), target=GPUTarget("cuda", 90, 32), options=options).asm[
        "ptx"
    ]


def with_activation(name: str, gate: Gate | Scalar, dtype: str, rows: int, whole: bool = True) -> tuple[str, int]:
    """Return the PTX of a kernel with all that it can do, or with what it must, and the numbers a thread."""
    from tensorformer.ops.grouped_experts import triton_activation

    numbers = tuple(f"given_{n}" for n in triton_activation.activation_text(gate, backward=True).numbers)
    switches = ("BIASED", "KEPT") if name == "projections" else ("BIASED", "SENT", "D_SHARE")
    size = {"INNER": True} if name == "gradients" else {}
    size |= {"ROWS": rows, "COLUMNS": 64, "DEPTH": 32 if dtype == "fp32" else 64}
    warps = 8 if rows * 64 > triton_launch.ROOM_WITH_ACTIVATION else 4
    kernel = getattr(triton_activation, name)(gate)
    text = compiled(kernel, numbers, size | dict.fromkeys(switches, whole), dtype, warps)
    return text, rows * 64 // (32 * warps)


@pytest.mark.parametrize("name", ["projections", "gradients"])
@pytest.mark.parametrize("rows", [16, 128])
def test_what_the_activation_costs_on_an_h100(name: str, rows: int) -> None:
    """A bilinear expert has neither an exponential nor a division; SwiGLU one of each a number, SiTU more."""
    pytest.importorskip("triton")
    from tests.ops.triton_ptx import divisions, exponentials

    for kind, expected in (("bilinear", (0, 0)), ("relu2", (0, 0)), ("swiglu", (1, 1)), ("situ", (3, 5))):
        gate = example(GATES[kind] if kind in GATES else SCALARS[kind])
        text, each = with_activation(name, gate, "bf16", rows)
        assert (len(exponentials(text)), len(divisions(text))) == tuple(n * each for n in expected)
        assert ("wgmma.mma_async" in text) == (rows > 16)  # a warp group multiplies 64 rows at a time
        assert ("mma.sync" in text) == (rows == 16)
        assert "cp.async" in text
        assert ".local" not in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("whole", [False, True])
def test_every_kernel_compiles(dtype: str, whole: bool) -> None:
    pytest.importorskip("triton")
    from tensorformer.ops.grouped_experts import triton_kernels

    most = 64 if dtype == "fp32" else 128
    warps = 8 if most**2 > triton_launch.ROOM else 4
    size = {"ROWS": most, "COLUMNS": most, "DEPTH": most // 2}
    plain = {"BIASED": whole, "SHARED": whole}
    transposed = {"WANTED": True, "TOTALLED": whole, "LEFT_SORTED": whole}
    texts = [
        compiled(triton_kernels.products, (), size | plain, dtype, warps),
        compiled(triton_kernels.transposed_products, (), size | transposed, dtype, warps),
        *(with_activation(n, GATES["bilinear"], dtype, most, whole)[0] for n in ("projections", "gradients")),
    ]
    if whole:
        only = {"WANTED": False, "TOTALLED": True, "LEFT_SORTED": False}
        texts.append(compiled(triton_kernels.transposed_products, (), size | only, dtype, warps))
    for text in texts[:4]:
        assert ("wgmma.mma_async" in text) == (dtype != "fp32")
        assert ("fma.rn.f32" in text) or dtype != "fp32"
        assert ".local" not in text


def test_a_tile_fits_into_shared_memory() -> None:
    """Of a GPU of compute capability 8.6 a program may have 99 KiB; loads are in flight for so many stages."""
    for dtype in (torch.bfloat16, torch.float32):
        most = triton_launch.widest(dtype)
        stage = (most + most) * (128 // dtype.itemsize) * dtype.itemsize
        assert stage * triton_launch.STAGES <= 99 * 1024


# When they are taken


def test_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = draw(6, 4, 2, 5, 3, dtype=torch.float32)
    for tried, words in (
        (case, "needs a CUDA device, or TRITON_INTERPRET=1 set before the process starts"),
        (case.to(torch.float64), 'computes in float32, which is too little for torch.float64: write impl="fast"'),
    ):
        with pytest.raises(ConfigError) as caught:
            call(tried.operands, tried, "triton")
        assert str(caught.value) == f'impl "triton" of grouped_experts {words}'
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"needs Triton: pip install 'tensorformer\[gpu\]'"):
        call(case.operands, case, "triton")


IN_A_GRAPH = """
import torch
from tensorformer.gates import GATES
from tensorformer.ops.grouped_experts import grouped_experts

def call(x, gate_up, down, weights, bias):
    return grouped_experts(x * 2, gate_up, down, gate, indices, weights, down_bias=bias, impl="triton") + 1

for gate, halves in ((GATES["situ"].bind(beta=4.0, linear_beta=None), 2), ("relu2", 1)):
    torch._dynamo.reset()
    shapes = (7, 4), (3, 4, halves * 5), (3, 5, 4), (7, 2), (3, 4)
    leaves = [torch.randn(s).requires_grad_() for s in shapes]
    indices = torch.rand(7, 3).topk(2).indices
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)
print("same")
"""


@pytest.mark.slow
def test_a_graph_takes_it_whole() -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", IN_A_GRAPH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


class _OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # pyright: ignore[reportAssignmentType]


def test_a_gpu_takes_it_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def chosen(case: Case, gate: Gate | Scalar | str = "swiglu", impl: str = "auto") -> str:
        x, gate_up, down, weights, indices = (
            t.as_subclass(_OnCuda) for t in (*case.operands[:4], case.indices) if t is not None
        )
        return resolve(x, gate_up, down, gate, indices, weights, impl=impl)

    case = draw(6, 4, 2, 5, 3, biases=False, dtype=torch.bfloat16)
    for capability, expected in (((7, 5), "fast"), ((8, 0), "triton"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert chosen(case) == "fast"  # a tensor of a class of its own
        with monkeypatch.context() as m:
            m.setattr(triton, "PLAIN", (_OnCuda,))
            assert chosen(case) == expected
            assert chosen(case.to(torch.float64)) == "fast"
            assert chosen(case, impl="fast") == "fast"
            assert chosen(case, impl="reference") == "reference"
            learned = torch.ones((), requires_grad=True)
            assert chosen(case, GATES["situ"].bind(beta=learned, linear_beta=None)) == "fast"
            with torch.no_grad():
                assert chosen(case, GATES["situ"].bind(beta=learned, linear_beta=None)) == expected


def test_a_formula_without_a_triton_form(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton, "_why_not_here", lambda *_: None)
    odd = Scalar("odd", "x*(1 + x*x)**(3/10)", ("-oo", "oo"), "here")
    case = draw(6, 4, 2, 5, 3, biases=False, halves=1, dtype=torch.float32)
    reason = triton.why_not(Operands(*case.operands), triton.Activation(odd, "gate_up"))  # pyright: ignore
    assert reason is not None
    assert "no Triton form" in reason


def test_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from tensorformer.ops.grouped_experts import grouped_experts, resolve;"
        "x = torch.ones(1, 2, 2); i = torch.zeros(2, 1).long(); a = (x[0], x, x, 'relu', i, i.float());"
        "grouped_experts(*a); resolve(*a); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
