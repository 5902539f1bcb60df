"""The gated linear map: its contract, its reference, and what its kernel becomes on an H100."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tensorformer.errors import ConfigError, GateError, ShapeError
from tensorformer.gates import GATES
from tensorformer.gates.examples import example
from tensorformer.ops.gated_linear import gated_linear, resolve
from tests.ops.interpreted import run_tests


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 7).to(dtype), torch.randn(5, 7).to(dtype), torch.randn(5, 7).to(dtype)


def test_it_is_torch_swiglu() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, a, b = operands(dtype)
        assert torch.equal(gated_linear(x, a, b, "bilinear"), F.linear(x, a) * F.linear(x, b))
        torch.testing.assert_close(gated_linear(x, a, b, "swiglu"), F.silu(F.linear(x, a)) * F.linear(x, b))


def test_gradients_of_operands_and_parameters() -> None:
    beta = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    leaves = [t.requires_grad_() for t in operands(torch.float64)]

    def of(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return gated_linear(x, a, b, GATES["situ"].bind(beta=beta, linear_beta=3.0))

    assert torch.autograd.gradcheck(of, (*leaves, beta))


def test_autocast() -> None:
    x, a, b = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert gated_linear(x, a, b.bfloat16(), "swiglu").dtype == torch.bfloat16
        assert gated_linear(*operands(torch.float64), "swiglu").dtype == torch.float64


COMPILED = """
import torch
from tensorformer.errors import ConfigError
from tensorformer.gates import GATES
from tensorformer.ops.gated_linear import gated_linear
gate = GATES["situ"].bind(beta=4.0, linear_beta=25.0)
x, a, b = (torch.randn(n, 7, requires_grad=True) for n in (3, 5, 5))
compiled = torch.compile(gated_linear, fullgraph=True, backend="aot_eager")
for gate in (gate, "swiglu"):
    y, z = compiled(x, a, b, gate), gated_linear(x, a, b, gate)
    torch.testing.assert_close(y, z)
    ours, theirs = (torch.autograd.grad(t.sum(), (x, a, b)) for t in (y, z))
    torch.testing.assert_close(ours, theirs)
"""


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    """In a process of its own: the hook that checks annotations does not compile."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_shapes_without_data() -> None:
    x, a, b = (t.to("meta") for t in operands())
    assert gated_linear(x, a, b, "swiglu").shape == (2, 3, 5)
    assert resolve(x, a, b, "swiglu") == "reference"


def test_bad_input() -> None:
    x, a, b = operands()
    for error, words, given in (
        (ShapeError, r"w_gate has shape \(5, 7\) and w_up \(4, 7\): write \(d_ff, d\) for both", (x, a, b[:4], "glu")),
        (ShapeError, r"their last axes are one, d", (x[..., :6], a, b, "glu")),
        (ShapeError, r"their last axes are one, d", (torch.tensor(1.0), a, b, "glu")),
        (ShapeError, r"x is torch.int64: write .float\(\)", (x.long(), a, b, "glu")),
        (ShapeError, r"write .to\(\) for one dtype", (x.double(), a, b, "glu")),
        (ShapeError, r"w_up is on meta and x on cpu", (x, a, b.to("meta"), "glu")),
        (ShapeError, r"linear_beta of shape \(4,\) does not fit \(2, 3, 5\)",
         (x, a, b, GATES["situ"].bind(beta=1.0, linear_beta=torch.ones(4)))),
        (GateError, r"unknown activation 'swigloo'; did you mean 'swiglu'", (x, a, b, "swigloo")),
        (GateError, r"'silu' is a function of one variable, .* with it, 'swiglu'", (x, a, b, "silu")),
        (GateError, r"'situ' needs beta", (x, a, b, "situ")),
        (GateError, r"'situ' needs beta", (x, a, b, GATES["situ"])),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            gated_linear(*given)
    with pytest.raises(ConfigError, match=r"no impl 'tritn' of gated_linear; did you mean 'triton'"):
        gated_linear(x, a, b, "glu", impl="tritn")
    words = r'impl "triton" of gated_linear computes in float32, which is too little for torch.float64'
    with pytest.raises(ConfigError, match=words):
        gated_linear(*operands(torch.float64), "glu", impl="triton")


def test_triton_asked_for_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, a, b = operands()
    words = "needs a CUDA device, or TRITON_INTERPRET=1 set before the process starts"
    with pytest.raises(ConfigError, match=words):
        gated_linear(x, a, b, "glu", impl="triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"needs Triton: pip install 'tensorformer\[gpu\]'"):
        gated_linear(x, a, b, "glu", impl="triton")


def test_importing_it_leaves_triton_alone() -> None:
    code = (
        "import sys, torch; from tensorformer.ops.gated_linear import gated_linear, triton; x = torch.ones(2, 2);"
        "gated_linear(x, x, x, 'swiglu'); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_tests(Path(__file__).with_name("triton_laws.py"))


@pytest.mark.parametrize("rows", [16, 4096])
def test_what_the_gate_costs_on_an_h100(rows: int) -> None:
    """The bilinear epilogue has neither an exponential nor a division; SwiGLU has one of each a number, SiTU more."""
    pytest.importorskip("triton")
    from tensorformer.ops.gated_linear import triton
    from tensorformer.ops.triton_kernel import gate_text
    from tests.ops.triton_ptx import divisions, exponentials, ptx

    size = triton.tile(rows, 1024, item=2, processors=132, shared=232448)
    constants = {"ROWS": size.rows, "COLUMNS": size.columns, "DEPTH": size.depth, "GROUP": 8, "PRECISION": "ieee"}
    each = size.rows * size.columns // (32 * size.warps)
    for name, expected in (("bilinear", (0, 0)), ("swiglu", (1, 1)), ("situ", (3, 5))):
        gate = example(GATES[name])
        numbers = gate_text(gate).numbers
        text = ptx(triton.kernel(gate), numbers, constants, num_warps=size.warps, num_stages=size.stages)
        # A thread has at least one vector of results to store, where there are fewer results than that.
        assert (len(exponentials(text)), len(divisions(text))) == tuple(n * max(each, 8) for n in expected)
        assert ("wgmma.mma_async" in text) == (rows > 16)  # a warp group multiplies 64 rows at a time
        assert ("mma.sync" in text) == (rows == 16)
        assert "cp.async" in text
        assert ".local" not in text


def test_tiles_fill_the_device() -> None:
    from tensorformer.ops.gated_linear.triton import tile

    for rows in (1, 16, 100, 4096):
        for columns in (16, 256, 768, 3072):
            for item, shared in ((2, 232448), (2, 101376), (2, 65536), (4, 232448), (4, 65536)):
                size = tile(rows, columns, item, 132, shared)
                assert (size.rows + 2 * size.columns) * size.depth * item * size.stages <= shared
                programs = -(-rows // size.rows) * -(-columns // size.columns)
                assert programs >= 132 or size.columns == 16
                assert size.rows < 2 * max(rows, 16)
