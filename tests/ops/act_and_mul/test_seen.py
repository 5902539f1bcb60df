"""What looks on: tracers, modes, forward-mode derivatives, lazy bits, default devices, and names that are alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorformer.errors import ConfigError, GateError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.ops.act_and_mul import act_and_mul, fast, native, resolve
from tensorformer.ops.act_and_mul.check import violations
from tensorformer.ops.act_and_mul.function import Kernels

SWIGLU = GATES["swiglu"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Have SwiGLU's native kernel, so that "auto" would take it."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORFORMER_CACHE", str(folder))
        patch.setattr(native, "_BUILT", {})  # what another test built lies in a folder of its own
        native.prepare(SWIGLU, torch.float32)
        assert resolve(torch.ones(2, 4), SWIGLU, layout="gate_up") == "native"
        yield folder


@pytest.mark.usefixtures("built")
def test_the_default_device_is_not_asked() -> None:
    x = torch.randn(3, 8)
    with torch.device("meta"):
        h = act_and_mul(x, SWIGLU, layout="gate_up")
    torch.testing.assert_close(h, SWIGLU(*x.chunk(2, -1)))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("impl", ["auto", "native", "fast"])
def test_the_negative_bit(impl: str) -> None:
    x = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    plain = x.resolve_neg().clone().requires_grad_()
    lazy = x.detach().requires_grad_()
    dh = torch.randn(4, 3, dtype=torch.complex64).conj().imag
    h = act_and_mul(lazy, SWIGLU, layout="gate_up", impl=impl)
    exact = SWIGLU(*plain.chunk(2, -1))
    torch.testing.assert_close(h, exact)
    (grad,) = torch.autograd.grad(h, lazy, dh)
    (expected,) = torch.autograd.grad(exact, plain, dh.resolve_neg())
    torch.testing.assert_close(grad, expected)


def test_a_trace_holds_the_formula(built: Path) -> None:
    """In a process of its own: while it traces, torch.jit makes tensors of sizes, which the annotations refuse."""
    code = """
import warnings; warnings.simplefilter("ignore")
import torch
from tensorformer.gates import GATES
from tensorformer.ops.act_and_mul import act_and_mul, resolve
assert resolve(torch.randn(3, 8), "swiglu", layout="gate_up") == "native"
traced = torch.jit.trace(lambda x: act_and_mul(x, "swiglu", layout="gate_up"), (torch.randn(3, 8),))
x = torch.randn(3, 8) * 5
torch.testing.assert_close(traced(x), GATES["swiglu"](*x.chunk(2, -1)))
"""
    environment = {**os.environ, "TENSORFORMER_CACHE": str(built)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("impl", ["auto", "fast", "reference"])
def test_forward_mode_derivatives(impl: str) -> None:
    x, tangent = torch.randn(2, 3, 8, dtype=torch.float32)
    with forward_ad.dual_level():
        h = act_and_mul(forward_ad.make_dual(x, tangent), SWIGLU, layout="gate_up", impl=impl)
        moved = forward_ad.unpack_dual(h).tangent
    assert moved is not None
    (g, u), (dg, du) = x.chunk(2, -1), tangent.chunk(2, -1)
    torch.testing.assert_close(moved, SWIGLU.gate.derivative(g) * dg * u + SWIGLU.gate(g) * du)


@pytest.mark.usefixtures("built")
def test_what_native_would_hide_is_refused() -> None:
    with (
        FakeTensorMode() as mode,
        pytest.raises(ConfigError, match="invisible to tensor subclasses, modes and tracers"),
    ):
        act_and_mul(mode.from_tensor(torch.ones(2, 4)), SWIGLU, layout="gate_up", impl="native")


def test_one_formula_with_its_parameters_in_another_order() -> None:
    first, second = (
        Gate(n, Scalar(n, "a*x + b", ("-oo", "oo"), "here", needs), SCALARS["identity"], "here")  # pyright: ignore
        for n, needs in (("ab", {"a": "> 0", "b": "> 0"}), ("ba", {"b": "> 0", "a": "> 0"}))
    )
    g, u = torch.randn(2, 5)
    for gate in (first.bind(a=2.0, b=3.0), second.bind(a=3.0, b=2.0)):
        torch.testing.assert_close(act_and_mul((g, u), gate, impl="fast"), gate(g, u))


def test_halves_that_were_bound_apart_are_refused() -> None:
    mine = Gate("mine", SCALARS["clip"].bind(limit=0.5), SCALARS["clip"].bind(limit=1.0), "here")
    with pytest.raises(GateError, match=r"mine: limit is 0.5 in one half and 1.0 in the other; bind the gate"):
        act_and_mul(torch.ones(2, 4), mine, layout="gate_up")


def test_a_dead_tail_breaks_the_laws() -> None:
    """GEGLU that is zero below −7: by its absolute error nobody would notice."""

    class Dead:
        @staticmethod
        def forward(gate: Gate, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return torch.where(g < -7, 0.0, fast.forward(gate, g, u)).contiguous()

        backward = staticmethod(fast.backward)

    assert isinstance(Dead, Kernels)
    assert any("left tail" in fault for fault in violations(Dead.forward, Dead.backward, GATES["geglu"], torch.float32))


def test_programs_of_a_number_that_changes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorformer.ops.act_and_mul import program

    monkeypatch.setattr(program, "_REMEMBERED", 4)
    monkeypatch.setattr(program, "_PROGRAMS", {})
    g, u = torch.randn(2, 5)
    for i in range(8):
        act_and_mul((g, u), GATES["swish_glu"].bind(beta=1.0 + i), impl="fast")
    assert len(program._PROGRAMS) == 4


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("impl", ["auto", "fast", "reference"])
def test_a_batch_of_gradients(impl: str) -> None:
    x = torch.randn(8, 14, requires_grad=True)
    h = act_and_mul(x, SWIGLU, layout="gate_up", impl=impl)
    many = torch.randn(5, 8, 7)
    (batched,) = torch.autograd.grad(h, x, many, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(h, x, dh, retain_graph=True)[0] for dh in many]
    torch.testing.assert_close(batched, torch.stack(apart), rtol=1e-5, atol=1e-6)


def test_a_compiler_with_an_open_quote_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "'c++")
    gate = GATES["swish_glu"].bind(beta=1.234)
    assert resolve(torch.ones(2, 4), gate, layout="gate_up") == "fast"
    with pytest.raises(ConfigError, match="native"):
        act_and_mul(torch.ones(2, 4), gate, layout="gate_up", impl="native")
