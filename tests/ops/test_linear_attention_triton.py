"""The Triton kernels: their laws under the interpreter, what they become on an H100, and when they are taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorformer.errors import ConfigError
from tensorformer.ops.linear_attention import resolve, triton
from tests.ops.interpreted import run_tests
from tests.ops.linear_attention_laws import Operands, operands

CPU = torch.device("cpu")


def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("linear_attention_triton_laws.py"))


def compiled(name: str, dtype: str = "bf16", **changes: Any) -> str:
    """Return a kernel's PTX for sm_90: two branches of 16 channels, contiguous, in chunks of 64 steps."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tensorformer.ops.linear_attention import triton_kernels
    from tensorformer.ops.triton_kernel import OPTIONS

    kernel = getattr(triton_kernels, name)
    low = dtype == "bf16"
    fixed: dict[str, Any] = {n: 1 for n in kernel.arg_names if n.endswith("_d")}
    fixed |= {"STEPS": 64, "FEATURES": 64, "VALUES": 64, "WIDE1": 16, "WIDE2": 16, "DEGREE": 2, "DECAY": True}
    fixed |= {"DOT": tl.bfloat16 if low else tl.float32, "PRECISION": "ieee", "D_DECAY": changes.get("DECAY", True)}
    fixed |= {"BEFORE": True, "AFTER": True, "KEPT": True, "REVERSED": False, **changes}
    states = {f"{n}_pointer": dtype for n in ("kept", "d_kept")}
    states |= {f"{n}_pointer": "fp32" for n in ("carry", "octave", "fraction", "into", "past")}
    signature, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in fixed:
            signature[argument] = "constexpr"
        else:
            pointer = argument.endswith("_pointer")
            signature[argument] = f"*{states.get(argument, dtype)}" if pointer else "i32"
            if argument not in triton_kernels.COUNTS:
                aligned[(i,)] = [["tt.divisibility", 16]]
    kept = {n: value for n, value in fixed.items() if n in kernel.arg_names}
    options = {**OPTIONS, "num_warps": 8 if name == "gradients" else 4, "num_stages": 1 if name == "gradients" else 2}
    return compile(ASTSource(kernel, signature, kept, aligned), target=GPUTarget("cuda", 90, 32), options=options).asm[
        "ptx"
    ]


@pytest.mark.parametrize("name", ["advance", "outputs", "gradients"])
def test_without_decay_there_is_no_exponential(name: str) -> None:
    from tests.ops.triton_ptx import divisions, exponentials

    text = compiled(name, DECAY=False)
    assert exponentials(text) == divisions(text) == []
    assert "wgmma" in text  # on the tensor cores
    assert ".local" not in text
    if name != "gradients":
        assert exponentials(compiled(name))


@pytest.mark.slow
def test_float32_is_multiplied_as_it_is() -> None:
    for name in ("advance", "outputs", "gradients"):
        text = compiled(name, "fp32", STEPS=32, FEATURES=32, VALUES=32)
        assert "fma.rn.f32" in text
        assert "mma." not in text.replace("fma.", "")


def test_one_branch_reads_no_other() -> None:
    two, one = compiled("advance", DECAY=False), compiled("advance", DECAY=False, DEGREE=1, K1=1)
    assert one.count("ld.global") < two.count("ld.global")


def test_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = operands(40).to(torch.float32)
    wide = operands(2, key_dims=(129, 1)).to(torch.float32)
    delta, channel = operands(5, update="delta").to(torch.float32), operands(5, channel=True).to(torch.float32)
    simple = 'has kernels for the additive update with one decay a head, or none: write impl="fast"'
    for given, options, words in [
        (x, {}, "needs a CUDA device, or TRITON_INTERPRET=1 set before the process starts"),
        (operands(5), {}, 'computes in float32, which is too little for torch.float64: write impl="fast"'),
        (x, {"chunk": 64}, "goes in chunks of 16, 32 steps in torch.float32, not 64: leave chunk out"),
        (wide, {}, 'has registers for 128 channels of a branch at most, not 129: write impl="fast"'),
        (delta, {}, simple),
        (channel, {}, simple),
    ]:
        with pytest.raises(ConfigError) as caught:
            given.call(resolve, impl="triton", **options)
        assert str(caught.value) == f'impl "triton" of linear_attention {words}'
        assert given.call(resolve)[0] == "fast"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = triton.why_not(operands(3).k, torch.float32, CPU, None)
    assert reason == "needs Triton: pip install 'tensorformer[gpu]'"


class _OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # pyright: ignore[reportAssignmentType]


def test_a_gpu_takes_it_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def there(x: Operands, dtype: torch.dtype = torch.bfloat16) -> Operands:
        return x.to(dtype).map(lambda _, t: t.as_subclass(_OnCuda))

    x = there(operands(100))
    for capability, expected in (((7, 5), "fast"), ((8, 0), "triton"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert x.call(resolve)[0] == expected
    assert tuple(x.call(resolve)) == ("triton", "chunked", 64)
    assert tuple(x.call(resolve, chunk=128)) == ("fast", "quadratic", 128)
    assert x.call(resolve, impl="reference")[0] == "reference"
    assert x.call(resolve, impl="fast")[0] == "fast"
    assert there(operands(100), torch.float64).call(resolve)[0] == "fast"
    assert there(operands(100, update="delta")).call(resolve)[0] == "fast"
    assert there(operands(100, channel=True)).call(resolve)[0] == "fast"
    one = there(operands(1, state=True))
    assert one.call(resolve)[0] == "fast"  # a step of decoding is a few small operations
    assert one.call(resolve, impl="triton")[0] == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.0"):
        x.call(resolve, impl="triton")


def test_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from tensorformer.ops.linear_attention import linear_attention, resolve;"
        "x = torch.ones(1, 3, 1, 2); linear_attention(x, x, x); resolve(x, x, x); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


IN_A_GRAPH = """
import torch
from tensorformer.ops.linear_attention import linear_attention

def call(q, k, v, log_decay):
    return linear_attention(q, k, v * 2, log_decay=log_decay, impl="triton")

draw = lambda *shape: torch.randn(1, 19, 2, *shape)
leaves = [t.requires_grad_() for t in (draw(3), draw(4), draw(3), draw(4), draw(5), -draw().abs())]
results = []
for function in (call, torch.compile(call, fullgraph=True)):
    y, s = function(tuple(leaves[:2]), tuple(leaves[2:4]), *leaves[4:])
    results.append([y, s, *torch.autograd.grad(y.square().sum() + s.square().sum(), leaves)])
for eager, graph in zip(*results, strict=True):
    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_a_graph_takes_it_whole() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", IN_A_GRAPH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
