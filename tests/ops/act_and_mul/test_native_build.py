"""What becomes of the libraries: kept, sealed, mended, refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tensorformer.errors import ConfigError, GateError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.examples import example
from tensorformer.ops import native_build
from tensorformer.ops.act_and_mul import native, native_source
from tests.ops.act_and_mul.processes import ALONE, run_alone

PLAIN = (SCALARS["identity"], "test")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native_build.why_not() is not None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("TENSORFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_BUILT", {})
    return tmp_path / "native"


def gate(name: str) -> Gate:
    return example(GATES[name])


def test_parameters_are_arguments(fresh: Path) -> None:
    """One library for all values of them; where one is absent the formula is another, and so is the library."""
    x = torch.randn(3, 50)
    for beta in (1.0, 4.0):
        situ = GATES["situ"].bind(beta=beta, linear_beta=25.0)
        torch.testing.assert_close(native.forward(situ, x, x), situ(x, x), rtol=1e-5, atol=1e-6)
    assert len(list(fresh.glob("*.so"))) == 1
    situ = GATES["situ"].bind(beta=4.0, linear_beta=None)
    torch.testing.assert_close(native.forward(situ, x, x), situ(x, x), rtol=1e-5, atol=1e-6)
    assert len(list(fresh.glob("*.so"))) == 2


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu, swish = gate("swiglu"), GATES["swish_glu"].bind(beta=torch.tensor(1.0))
    assert native.why_not(swiglu, torch.float32, CPU) is None
    for dtype in (torch.float64, torch.float16):
        assert "float32 and bfloat16, not" in str(native.why_not(swiglu, dtype, CPU))
    assert "not on meta" in str(native.why_not(swiglu, torch.float32, torch.device("meta")))
    assert "beta is a tensor" in str(native.why_not(swish, torch.float32, CPU))
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux and macOS" in str(native.why_not(swiglu, torch.float32, CPU))


def test_refusals(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ConfigError, match="beta is a tensor: bind a float, or write impl='fast'"):
        native.prepare(GATES["swish_glu"].bind(beta=torch.tensor(1.0)), torch.float32)
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        native.forward(gate("swiglu"), x.double(), x.double())
    with pytest.raises(GateError, match="beta"):
        native.prepare(GATES["swish_glu"], torch.float32)
    unknown = Gate("unknown", Scalar("unknown", "Phi(x)**m", ("0", "1"), "test", {"m": "> 0"}).bind(m=0.5), *PLAIN)
    with pytest.raises(GateError, match=r"no C\+\+ form"):
        native.prepare(unknown, torch.float32)
    fresh.mkdir(exist_ok=True)
    assert not native.is_ready(unknown, torch.float32)
    assert not native.is_ready(GATES["swish_glu"].bind(beta=torch.tensor(1.0)), torch.float32)
    assert not native.is_ready(gate("swiglu"), torch.float64)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="CXX='no-such-compiler' is none: install one"):
        native.prepare(gate("swiglu"), torch.float32)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"none of .* is on the PATH: install one .*, or write impl='fast'"):
        native.prepare(gate("swiglu"), torch.float32)
    assert not native.is_ready(gate("swiglu"), torch.float32)


def test_a_compiler_that_fails(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo none 1.0 && exit 0\necho 'error: no' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(ConfigError, match=r"can't build .*\.cpp, with no other flags: error: no; write impl='fast'"):
        native.prepare(gate("swiglu"), torch.float32)
    assert not [*fresh.glob("*.so"), *fresh.glob("*.json"), *fresh.glob(".*")]


def test_a_compiler_that_knows_nothing_of_threads(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for less, and the kernel is as right as before."""
    program = tmp_path / "c++"
    program.write_text(
        '#!/bin/sh\nfor a in "$@"; do case "$a" in -fopenmp|-march=native) echo "error: $a" >&2; exit 1;; esac; done\n'
        f'exec {native_build._command()[0]} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    g, u = torch.randn(2, 5, 257)
    torch.testing.assert_close(native.forward(gate("situ"), g, u), gate("situ")(g, u), rtol=1e-5, atol=1e-6)


def test_the_cache_is_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu = gate("swiglu")
    assert not native.is_ready(swiglu, torch.float32)
    native.prepare(swiglu, torch.float32)
    assert native.is_ready(swiglu, torch.float32)
    assert not native.is_ready(swiglu, torch.bfloat16), "its laws have not been tried"
    # Another process: nothing loaded, and nothing may be compiled or tried again.
    monkeypatch.setattr(native, "_BUILT", {})
    monkeypatch.setattr(native_build.Library, "build", lambda self: pytest.fail("built again"))
    monkeypatch.setattr(native, "_hold_to_laws", lambda *a: pytest.fail("tried again"))
    assert native.is_ready(gate("swiglu"), torch.float32)
    native.prepare(swiglu, torch.float32)


@pytest.mark.parametrize("damage", ["library", "seal", "absent"])
def test_a_damaged_cache_is_built_again(damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.prepare(gate("bilinear"), torch.float32)
    (library,) = fresh.glob("*.so")
    hurt = library if damage == "library" else library.with_suffix(".json")
    content = hurt.read_bytes()
    hurt.unlink()  # not written into: this process has it mapped
    if damage != "absent":
        hurt.write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(native, "_BUILT", {})
    assert not native.is_ready(gate("bilinear"), torch.float32)
    native.prepare(gate("bilinear"), torch.float32)
    monkeypatch.setattr(native, "_BUILT", {})
    assert native.is_ready(gate("bilinear"), torch.float32)


BREAKS: dict[str, Callable[[str], str]] = {
    "derivative off by 1 %": lambda s: s.replace("dh * f_u * d_g;", "dh * f_u * d_g * 1.01f;"),
    "gradients swapped": lambda s: s.replace("narrow(dg, dg_out[i]);", "narrow(du, dg_out[i]);").replace(
        "narrow(du, du_out", "narrow(dg, du_out"
    ),
    "a fast exponential": lambda s: s.replace("1.666657667e-1f", "1.67e-1f"),
    "the last number forgotten": lambda s: s.replace(
        "i < n; ++i) {\n    const float g", "i < n - 1; ++i) {\n    const float g"
    ),
    "strides ignored": lambda s: s.replace("from[2 * i]", "from[i]").replace("from[i * step]", "from[i]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_never_used(name: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = native_source.native_source
    broken = BREAKS[name](whole(gate("swiglu"), []))
    assert broken != whole(gate("swiglu"), [])
    monkeypatch.setattr(native_source, "native_source", lambda *a: broken)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"breaks its laws in torch\.float32: .*; write impl='fast'"):
            native.prepare(gate("swiglu"), torch.float32)
        assert not native.is_ready(gate("swiglu"), torch.float32)
        monkeypatch.setattr(native, "_BUILT", {})


def test_two_processes_build_at_once(fresh: Path) -> None:
    script = ALONE + "x = torch.ones(3, 5)\nprint(native.forward(gate, x, x).sum().item())"
    said = run_alone(script, script)
    assert said[0] == said[1]
    assert said[0][0].startswith("10.96")
    assert len(list(fresh.glob("*.so"))) == 1
    assert not list(fresh.glob(".*"))
