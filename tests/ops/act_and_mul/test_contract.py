"""The contract around the mathematics: operands, errors, memory, dtypes, devices, transforms, and what runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorformer.errors import ConfigError, GateError, ShapeError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.ops.act_and_mul import act_and_mul, fast, function, native, program, resolve, triton
from tensorformer.ops.operands import LAYOUTS, halves
from tests.gates.gate_laws import GATE_NAMES, gate

SITU = GATES["situ"].bind(beta=4.0, linear_beta=25.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    x = torch.arange(10.0)
    places = {"gate_up": ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]), "interleaved": ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])}
    g, u = places.get(layout, places["gate_up"][::-1])
    h = act_and_mul(x, "reglu", layout=layout, impl="fast")
    assert torch.equal(h, torch.tensor(g).float() * torch.tensor(u).float())
    assert torch.equal(h, act_and_mul((x[g], x[u]), "reglu", impl="fast"))


# Memory


@pytest.mark.parametrize("name", ["swiglu", "situ", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["gate_up", None])
def test_saves_its_input_and_nothing_else(name: str, dtype: torch.dtype, layout: str | None) -> None:
    x = torch.randn(31, 26, dtype=dtype, requires_grad=True)
    operands = x if layout else halves(x, "gate_up")
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        h = act_and_mul(operands, gate(name), layout=layout, impl="fast")
    assert 0 < sum(saved.values()) <= x.nbytes
    h.sum().backward()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return out


@pytest.mark.parametrize("name", ["swiglu", "situ"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_makes_its_outputs_and_tiles(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TILE", 500)
    x = torch.randn(64, 200).to(dtype)
    g, u = x.split(100, -1)
    dg, du = halves(x.clone(), "gate_up")
    with Largest() as largest:
        fast.backward(gate(name), g, u, g, dg, du)
    assert 0 < largest.elements <= 500
    with Largest() as largest:
        fast.forward(gate(name), g, u)
    assert largest.elements == g.numel()  # h


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("name", GATE_NAMES)
def test_inputs_are_never_written_to(impl: str, name: str) -> None:
    for shape in ((5, 14), (3, 1, 6), (14,)):
        x = torch.randn(shape, requires_grad=True)
        before = x.detach().clone()
        h = act_and_mul(x, gate(name), layout="up_gate", impl=impl)
        dh = torch.randn_like(h)
        kept = dh.clone()
        h.backward(dh)
        assert torch.equal(x, before)
        assert x._version == 0
        assert torch.equal(dh, kept)
        assert h.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_one_tensor_as_both_halves() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    h = act_and_mul((x, x), "bilinear", impl="fast")
    (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 2 * x)
    (again,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(again, torch.full_like(x, 2.0))


# Sizes, strides, who needs a gradient


@pytest.mark.parametrize("name", ["swiglu", "situ", "powlu"])
@pytest.mark.parametrize("size", [0, 1, 3, 7, 63, 257, 1368])
def test_any_size_and_strides(name: str, size: int) -> None:
    base = torch.randn(3, 2 * size, 2)
    for x in (base[..., 0], base[..., 0].t().contiguous().t(), base[:1, :, 0].expand(4, -1), base[0, :, 1]):
        x = x.detach().requires_grad_()
        for layout in LAYOUTS:
            results = []
            for impl in ("fast", "reference"):
                h = act_and_mul(x, gate(name), layout=layout, impl=impl)
                results.append((h, *torch.autograd.grad(h.sum(), x)))  # a gradient of stride 0
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_only_one_of_a_pair_needs_a_gradient(first: bool, second: bool) -> None:
    g, u = torch.randn(2, 4, 5)
    g, u = g.requires_grad_(first), u.requires_grad_(second)
    h = act_and_mul((g, u), SITU, impl="fast")
    (found,) = torch.autograd.grad(h.sum(), g if first else u, retain_graph=True)
    (truth,) = torch.autograd.grad(SITU(g, u).sum(), g if first else u)
    torch.testing.assert_close(found, truth)
    h.sum().backward()
    assert (g.grad is None) is second


def test_only_a_parameter_needs_a_gradient() -> None:
    x, beta = torch.randn(4, 6), torch.tensor(2.0, requires_grad=True)
    f = GATES["situ"].bind(beta=beta, linear_beta=None)
    (found,) = torch.autograd.grad(act_and_mul(x, f, layout="gate_up", impl="fast").sum(), beta)
    (truth,) = torch.autograd.grad(f(*halves(x, "gate_up")).sum(), beta)
    torch.testing.assert_close(found, truth)
    with torch.no_grad():
        assert not act_and_mul(x, f, layout="gate_up", impl="fast").requires_grad


@pytest.mark.parametrize("name", GATE_NAMES)
def test_meta_tensors_past_two_to_the_31(name: str) -> None:
    x = torch.empty(3, 2**31 + 6, device="meta", requires_grad=True)
    for layout in LAYOUTS:
        h = act_and_mul(x, gate(name), layout=layout)
        assert h.shape == (3, 2**30 + 3)
        h.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(3, 8)).requires_grad_()
        for name in GATE_NAMES:
            h = act_and_mul(x, gate(name), layout="gate_up")
            h.sum().backward()
            assert h.shape == (3, 4)


# dtypes


@pytest.mark.parametrize("impl", ["auto", "fast", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_in_is_dtype_out(impl: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).to(dtype).requires_grad_()
    h = act_and_mul(x, "swiglu", layout="gate_up", impl=impl)
    assert h.dtype == dtype
    h.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_autocast_only_joins_unlike_dtypes() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    plain = act_and_mul(x, SITU, layout="gate_up")
    g, u = torch.randn(3, 4), torch.randn(3, 4).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(act_and_mul(x, SITU, layout="gate_up"), plain)
        h = act_and_mul((g, u), SITU)
        h.sum().backward()
    assert h.dtype == torch.float32
    assert torch.equal(h, act_and_mul((g, u.float()), SITU))
    assert u.grad is not None
    assert u.grad.dtype == torch.bfloat16


# Transforms


@pytest.mark.parametrize("impl", ["auto", "fast", "reference"])
def test_torch_func(impl: str) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return act_and_mul(x, SITU, layout="gate_up", impl=impl)

    (exact,) = torch.autograd.grad(f(leaf := x.clone().requires_grad_()).sum(), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x), exact)
    tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
    moved = torch.autograd.functional.jvp(f, x, torch.ones_like(x))[1]
    torch.testing.assert_close(tangent, moved)


def test_torch_func_has_no_native_form() -> None:
    with pytest.raises(
        ConfigError,
        match=r'impl "native" is not for torch.func',
    ):
        torch.func.vmap(lambda x: act_and_mul(x, "swiglu", layout="gate_up", impl="native"))(torch.randn(3, 8))


# What runs


def test_what_runs_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)
    monkeypatch.setattr(native, "is_ready", lambda gate, dtype: False)
    assert resolve(x, "swiglu", layout="gate_up") == "fast"
    monkeypatch.setattr(native, "is_ready", lambda gate, dtype: True)
    assert resolve(x, "swiglu", layout="gate_up") == "native"
    assert resolve(x.bfloat16(), "swiglu", layout="gate_up") == "native"
    for dtype in (torch.float64, torch.float16):
        assert resolve(x.to(dtype), "swiglu", layout="gate_up") == "fast"
    assert resolve(x.to("meta"), "swiglu", layout="gate_up") == "fast"
    for impl in ("reference", "fast"):
        assert resolve((x, x), "swiglu", impl=impl) == impl
    with Largest():  # what records operators would not see a native kernel
        assert resolve(x, "swiglu", layout="gate_up") == "fast"


def test_what_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    ran: list[str] = []

    def noted(name: str, of: Any) -> Any:
        def call(*args: Any) -> Any:
            ran.append(name)
            return of(*args)

        return call

    forward, backward = fast.forward, fast.backward
    for impl, module in (("fast", fast), ("native", native), ("triton", triton)):
        monkeypatch.setattr(module, "forward", noted(impl, forward))
        monkeypatch.setattr(module, "backward", noted(impl, backward))
        monkeypatch.setattr(module, "why_not", lambda gate, dtype, device: None, raising=False)
    monkeypatch.setattr(native, "is_ready", lambda gate, dtype: True)
    for impl, name in (("fast", "fast"), ("native", "native"), ("triton", "triton"), ("auto", "native")):
        ran.clear()
        act_and_mul(x, "swiglu", layout="gate_up", impl=impl).sum().backward()
        assert set(ran) == {name}
        assert len(ran) >= 2
    assert function.load("fast") is fast


def test_an_exact_gate_runs_in_its_own_dtype() -> None:
    assert [n for n in GATE_NAMES if program.is_exact(gate(n))] == ["bilinear", "drelu", "reglu"]
    assert program.program(gate("bilinear"), torch.bfloat16, ("h",)).scratch == 0


def test_a_program_is_written_once_for_each_formula_and_its_numbers() -> None:
    first = program.program(SITU, torch.float32, ("h",))
    assert program.program(GATES["situ"].bind(beta=4, linear_beta=25), torch.float32, ("h",)) is first
    assert program.program(GATES["situ"].bind(beta=5, linear_beta=25), torch.float32, ("h",)) is not first
    assert "torch.tanh" in first.source


# Errors: one line, what was wrong, and what to write


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


OPERANDS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        x(3, 7),
        {"layout": "gate_up"},
        ShapeError,
        r"x has shape \(3, 7\): its last axis .* and 7 is odd",
    ),
    (x(), {"layout": "gate_up"}, ShapeError, "x is a single number"),
    (x(3, 8), {}, ConfigError, 'write one of "gate_up", "up_gate", "interleaved", or a pair'),
    (x(3, 8), {"layout": "gate_pu"}, ConfigError, "unknown layout 'gate_pu'; did you mean 'gate_up'"),
    ((x(3), x(3)), {"layout": "gate_up"}, ConfigError, r"layout='gate_up' with a pair \(g, u\).* leave layout out"),
    ((x(3), x(4)), {}, ShapeError, r"g is \(3,\) .* and u \(4,\) .* on cpu: they need one shape"),
    ((x(3), x(3).to("meta")), {}, ShapeError, "on cpu and u .* on meta"),
    (
        (x(3), x(3).bfloat16()),
        {},
        ShapeError,
        r"torch.float32 .* torch.bfloat16 .* one shape, dtype and device",
    ),
    (x(3, 8, dtype=torch.int64), {"layout": "gate_up"}, ShapeError, r"x is torch.int64: write .float\(\)"),
    ((x(3), x(3, dtype=torch.bool)), {}, ShapeError, r"u is torch.bool: write .float\(\)"),
    (x(3, 8), {"layout": "gate_up", "impl": "natvie"}, ConfigError, "no impl 'natvie' of act_and_mul; did you mean"),
    (x(3, 8), {"layout": "gate_up", "impl": "triton"}, ConfigError, 'impl "triton" can\'t run swiglu here: it needs'),
    (x(3, 8).double(), {"layout": "gate_up", "impl": "native"}, ConfigError, 'impl "native" can\'t run swiglu here'),
    (x(3, 8).to("meta"), {"layout": "gate_up", "impl": "native"}, ConfigError, 'impl "native" can\'t run swiglu here'),
]


@pytest.mark.parametrize(("operands", "options", "kind", "words"), OPERANDS, ids=range(len(OPERANDS)))
def test_bad_operands(operands: Any, options: dict[str, Any], kind: type[Exception], words: str) -> None:
    for call in (act_and_mul, resolve):
        with pytest.raises(kind, match=words) as error:
            call(operands, "swiglu", **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("swigul", "unknown activation 'swigul'; did you mean 'swiglu'"),
        (
            "silu",
            r"'silu' is a function of .* write a gate with it, 'swiglu', or SCALARS\['silu'\]\(x\)$",
        ),
        ("mish", r"write a gate, or SCALARS\['mish'\]\(x\)$"),
        ("situ", "'situ' needs beta"),
        (GATES["situ"], "'situ' needs beta"),
        (SCALARS["gelu"], r"'gelu' is a function of one variable.* write a gate with it, 'geglu', or"),
    ],
    ids=str,
)
def test_bad_gates(named: Gate | Scalar | str, words: str) -> None:
    for call, impl in itertools.product((act_and_mul, resolve), ("auto", "reference", "fast", "native")):
        with pytest.raises(GateError, match=words):
            call(x(3, 8), named, layout="gate_up", impl=impl)


def test_a_parameter_that_does_not_fit() -> None:
    wrong = GATES["situ"].bind(beta=torch.ones(3), linear_beta=None)
    for impl in ("auto", "fast", "reference"):
        with pytest.raises(ShapeError, match=r"beta of shape \(3,\) does not fit \(5, 4\)"):
            act_and_mul(x(5, 8), wrong, layout="gate_up", impl=impl)
    with pytest.raises(ConfigError, match="beta is a tensor"):
        act_and_mul(x(5, 6), wrong, layout="gate_up", impl="native")
