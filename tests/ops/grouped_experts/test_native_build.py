"""What becomes of experts in C++: kept, sealed, taken by "auto", refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate, Scalar
from tensorformer.ops import native_build
from tensorformer.ops.grouped_experts import grouped_experts, native, native_call, native_source, resolve
from tensorformer.ops.grouped_experts.activation import Activation, ready
from tensorformer.ops.operands import LAYOUTS
from tests.ops.grouped_experts.expert_laws import Case, assert_laws, call, draw, run

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    native_build.why_not() is not None or not torch.backends.mkl.is_available(), reason="no C++ compiler or no MKL here"
)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("TENSORFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_BUILT", {})
    return tmp_path / "native"


def _native(case: Case) -> list[Tensor]:
    return run(case, "native")


def arguments(
    dtype: torch.dtype = torch.float32, gate: Gate | Scalar | str = "swiglu", **changes: Any
) -> dict[str, Any]:
    case = draw(6, 4, 2, 5, 3, biases=False, dtype=dtype)
    x, gate_up, down, weights, *_ = case.operands
    return {"x": x, "gate_up": gate_up, "down": down, "weights": weights, "indices": case.indices, "gate": gate,
            "impl": "native", **changes}  # fmt: skip


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ConfigError, match=r'computes float32 and bfloat16, not torch\.float\d+: write impl="fast"'):
            grouped_experts(**arguments(dtype))
    learned = GATES["situ"].bind(beta=torch.ones(4, 1, 3), linear_beta=2.0)
    with pytest.raises(ConfigError, match='beta is a tensor: bind a float, or write impl="fast"'):
        grouped_experts(**arguments(gate=learned))
    bodiless: dict[str, Any] = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in arguments().items()}
    with pytest.raises(ConfigError, match="runs on the CPU, not on meta"):
        grouped_experts(**bodiless)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ConfigError, match="invisible to tensor subclasses"):
        grouped_experts(**arguments())
    monkeypatch.setattr(native, "_BUILT", {})
    monkeypatch.setattr(native_call, "blas", lambda: None)
    with pytest.raises(ConfigError, match='MKL inside of torch, and this torch has none: write impl="fast"'):
        grouped_experts(**arguments())


def test_auto_takes_it_where_it_was_built(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu = ready("swiglu", "gate_up")
    assert resolve(**arguments(impl="auto")) == "fast"
    native.prepare(swiglu, torch.float32)
    assert resolve(**arguments(impl="auto")) == "native"
    assert resolve(**arguments(torch.bfloat16, impl="auto")) == "fast", "its laws have not been tried"
    assert resolve(**arguments(torch.float64, impl="auto")) == "fast"
    torch.set_num_threads(3)
    try:
        assert resolve(**arguments(impl="auto")) == "fast", "fewer experts than keep the threads busy"
    finally:
        torch.set_num_threads(1)
    # Another process: nothing loaded, and nothing may be compiled or tried again.
    monkeypatch.setattr(native, "_BUILT", {})
    monkeypatch.setattr(native_build.Library, "build", lambda self: pytest.fail("built again"))
    monkeypatch.setattr(native, "_hold_to_laws", lambda *a: pytest.fail("tried again"))
    assert resolve(**arguments(impl="auto")) == "native"
    y = grouped_experts(**arguments(impl="auto"))
    assert torch.equal(y, grouped_experts(**arguments()))


def test_without_the_instructions_of_this_processor(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that knows of neither threads nor dots of bfloat16 makes kernels that are as right."""
    program = tmp_path / "c++"
    program.write_text(
        '#!/bin/sh\nfor a in "$@"; do case "$a" in -fopenmp|-march=native) echo "error: $a" >&2; exit 1;; esac; done\n'
        f'exec {native_build._command()[0]} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    for dtype in DTYPES:
        assert_laws(_native, draw(63, 5, 2, 33, 17, dtype=dtype))
        assert_laws(_native, draw(900, 3, 2, 7, 3, dtype=dtype))


BREAKS: dict[str, Callable[[str], str]] = {
    "token ids tiled": lambda s: s.replace("plan.choices[start + r] / t.top_k", "plan.choices[start + r] % t.tokens"),
    "a choice of another token": lambda s: s.replace("plan.places[i] = row;", "plan.places[choices - 1 - i] = row;"),
    "the last row forgotten": lambda s: s.replace("for (int64_t r = 0; r < rows; ++r) {\n      if (add)",
                                                  "for (int64_t r = 0; r < rows - 1; ++r) {\n      if (add)"),
    "a piece overwritten": lambda s: s.replace("to - from, i > 0);", "to - from, false);"),
    "idle experts unwritten": lambda s: s.replace("if (idle && to.step == inner) {", "if (idle) return;\n if (0) {"),
    "a bias not weighted": lambda s: s.replace("[=](int64_t r) { return share(start + r); }",
                                               "[](int64_t) { return 1.0f; }"),
    "halves swapped": lambda s: s.replace("const float g = widen(g_in", "const float g = widen(u_in").replace(
        "u = widen(u_in", "u = widen(g_in"),
    "derivative off by 1 %": lambda s: s.replace("dh * f_u * d_g;", "dh * f_u * d_g * 1.01f;"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if i == 1 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(BREAKS)]
)
def test_broken_kernels_are_never_used(name: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu = ready("swiglu", "gate_up")
    whole = native_source.native_source(swiglu, [])
    broken = BREAKS[name](whole)
    assert broken != whole
    monkeypatch.setattr(native_source, "native_source", lambda *_: broken)
    with pytest.raises(ConfigError, match=r"break their laws in torch\.float32: .*; write impl='fast'"):
        native.prepare(swiglu, torch.float32)
    assert not native.is_ready(swiglu, torch.float32)


@pytest.mark.slow
def test_the_same_formula_is_one_library(fresh: Path) -> None:
    """Layouts and parameters are arguments."""
    for layout in LAYOUTS:
        for beta in (1.0, 4.0):
            gate = GATES["situ"].bind(beta=beta, linear_beta=25.0)
            native.prepare(Activation(gate, layout), torch.float32)
            case = draw(31, 5, 2, 7, 3, gate, layout=layout, dtype=torch.float32)
            torch.testing.assert_close(call(case.operands, case, "native"), call(case.operands, case, "fast"))
    assert len(list(fresh.glob("*.so"))) == 1
