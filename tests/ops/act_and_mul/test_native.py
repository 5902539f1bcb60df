"""The C++ kernels: their arithmetic against float64, memory of any strides and its end, threads and forks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tensorformer.gates import GATES, SCALARS, Gate
from tensorformer.gates.examples import example
from tensorformer.ops import native_build
from tensorformer.ops.act_and_mul import native, native_source
from tensorformer.testing.inputs import points
from tensorformer.testing.laws import assert_slope, assert_value
from tests.ops.act_and_mul.processes import ALONE, run_alone

DTYPES = [torch.float32, torch.bfloat16]
SIZES = (1, 3, 7, 63, 257, 1368)
FEW = ("swiglu", "geglu", "situ")
MANY = [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in sorted(GATES)]
pytestmark = pytest.mark.skipif(native_build.why_not() is not None, reason="no C++ compiler here")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One empty cache for the module, so that each gate is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TENSORFORMER_CACHE", str(folder))
        patch.setattr(native, "_BUILT", {})
        yield folder / "native"


def gate(name: str) -> Gate:
    return example(GATES[name])


def truth(gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
    """h and both gradients in float64, from the formula."""
    g, u = (x.detach().double().requires_grad_() for x in (g, u))
    h = gate(g, u)
    return h.detach(), *torch.autograd.grad(h, (g, u), dh.double())


def in_torch(gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
    g, u = (x.detach().clone().requires_grad_() for x in (g, u))
    h = gate(g, u)
    return h.detach(), *torch.autograd.grad(h, (g, u), dh)


def run(gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h and both gradients from C++, into memory full of NaN."""
    dg, du = (torch.full(g.shape, torch.nan, dtype=g.dtype) for _ in range(2))
    h = native.forward(gate, g, u)
    native.backward(gate, g, u, dh, dg, du)
    return h, dg, du


def assert_near(found: tuple[Tensor, ...], gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> None:
    """Each within twice the error of torch's own and a rounding of the largest."""
    for name, y, exact, plain in zip(
        ("h", "dg", "du"), found, truth(gate, g, u, dh), in_torch(gate, g, u, dh), strict=True
    ):
        assert y.dtype == g.dtype
        error, other = ((t.double() - exact).abs().max().item() for t in (y, plain))
        allowed = 2 * (other + torch.finfo(g.dtype).eps * exact.abs().max().item())
        assert error <= allowed, (
            f"{gate.name} {name} {tuple(g.shape)} {g.dtype}: {error:.3g} off, {allowed:.3g} allowed"
        )


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g, u, dh = (torch.randn(shape) * s for s in (3.0, 5.0, 1.0))
    return g.to(dtype), u.to(dtype), dh.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MANY)
def test_any_size(name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        g, u, dh = operands((3, size), dtype)
        assert_near(run(gate(name), g, u, dh), gate(name), g, u, dh)
    g, u, dh = operands((), dtype)
    assert_near(run(gate(name), g, u, dh), gate(name), g, u, dh)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["gate", "value"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("silu", "gelu") else pytest.mark.slow) for n in sorted(SCALARS)]
)
def test_tails_and_limits(name: str, side: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function beside a plain one, at both infinities, at NaN and where there is least precision."""
    # Fifty digits are the law here.
    monkeypatch.setattr(native, "_hold_to_laws", lambda *a: None)
    scalar, plain = example(SCALARS[name]), SCALARS["identity"]
    pair = Gate(name, scalar, plain, "test") if side == "gate" else Gate(name, plain, scalar, "test")

    def value(x: Tensor) -> Tensor:
        one = torch.ones_like(x)
        return native.forward(pair, *((x, one) if side == "gate" else (one, x)))

    def slope(x: Tensor) -> Tensor:
        one, dx = torch.ones_like(x), torch.full_like(x, 17.0)
        if side == "gate":
            native.backward(pair, x, one, one, dx, None)
        else:
            native.backward(pair, one, x, one, None, dx)
        return dx

    x = points(dtype)
    assert_value(value, scalar, x)
    assert_slope(slope, scalar, x[:-1])
    if not scalar.derivative(x)[-1].isfinite():
        assert slope(x)[-1].isnan(), "the gradient at NaN"


def strided(x: Tensor) -> list[Tensor]:
    """The same numbers in memory with steps of 2 and 3, transposed, one row for all, and with no view as a table."""
    a, b, c = x.shape
    spread = torch.zeros(a, b, 2 * c, dtype=x.dtype)[..., ::2]
    thirds = torch.zeros(a, b, 3 * c, dtype=x.dtype)[..., 1::3]
    turned = torch.zeros(c, b, a, dtype=x.dtype).permute(2, 1, 0)
    padded = torch.zeros(a, b + 2, c + 1, dtype=x.dtype)[:, 1:-1, :-1]
    return [view.copy_(x) for view in (spread, thirds, turned, padded)] + [x[:1, :1].expand(a, b, c)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype: torch.dtype) -> None:
    swiglu = gate("swiglu")
    for g in strided(torch.randn(2, 3, 19).to(dtype)):
        for u in strided(torch.randn(2, 3, 19).to(dtype)):
            for dh in (torch.randn(2, 3, 19).to(dtype), torch.tensor(0.7, dtype=dtype).expand(2, 3, 19)):
                before = g.clone(), u.clone(), dh.clone()
                assert_near(run(swiglu, g, u, dh), swiglu, *before)
                assert torch.equal(g, before[0])
                assert torch.equal(u, before[1])
                assert torch.equal(dh, before[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_of_gradients(dtype: torch.dtype) -> None:
    """Written where they belong, and nothing written beside."""
    swiglu = gate("swiglu")
    g, u, dh = operands((2, 3, 19), dtype)
    expected = run(swiglu, g, u, dh)[1:]
    for make in (
        lambda t: (t[:, 1:-1, :19], t[:, 1:-1, 19:38]),
        lambda t: (t[:, 1:-1, 0:38:2], t[:, 1:-1, 1:38:2]),
        lambda t: (t[:, 1:-1, 1:38:2], t[:, 1:-1, 0:38:2]),
        lambda t: (t[:, 0:3, 0:57:3], t[:, 2:5, 2:59:3]),
        lambda t: (t[:, 1:-1, :19], None),
        lambda t: (None, t[:, 1:-1, 0:38:2]),
    ):
        memory = torch.full((2, 5, 60), 17.0, dtype=dtype)
        views = make(memory)
        native.backward(swiglu, g, u, dh, *views)
        for view, right in zip(views, expected, strict=True):
            if view is not None:
                assert torch.equal(view, right)
                view.fill_(17.0)
        assert (memory == 17.0).all()
    memory = torch.full((19, 3, 2), torch.nan, dtype=dtype)
    native.backward(swiglu, g, u, dh, memory.permute(2, 1, 0), None)
    assert torch.equal(memory.permute(2, 1, 0), expected[0])


def test_nothing_there() -> None:
    for shape in ((0,), (0, 5), (4, 0), (2, 0, 3)):
        x = torch.zeros(shape)
        h, dg, du = run(gate("swiglu"), x, x, x)
        assert h.shape == dg.shape == du.shape == shape


def test_bfloat16_rounds_as_torch_does() -> None:
    """Ties, overflow, subnormals, ±∞ and NaN, bit for bit: every bfloat16 times two that make the last bits matter."""
    g = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for factor in (1.0, 1.0078125, 1.5, 3.0e38, 1e-20):
        u = torch.full_like(g, factor)
        h, exact = native.forward(gate("bilinear"), g, u), (g.float() * u.float()).bfloat16()
        # Equal as bits, but for the many NaN.
        assert torch.equal(h.isnan(), exact.isnan())
        assert torch.equal(
            torch.where(h.isnan(), 0, h).view(torch.int16), torch.where(h.isnan(), 0, exact).view(torch.int16)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads(dtype: torch.dtype) -> None:
    operands_ = operands((37, 1368), dtype)
    alone = run(gate("swiglu"), *operands_)
    torch.set_num_threads(2)
    try:
        together = run(gate("swiglu"), *operands_)
    finally:
        torch.set_num_threads(1)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)


def test_the_end_of_memory_and_a_fork() -> None:
    """Arrays that end at a page nobody may touch; then a child process, which has none of its parent's threads."""
    script = (
        ALONE
        + """
import ctypes, mmap, os
libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
def at_the_end(count, dtype):
    size = count * dtype.itemsize
    total = -(-size // page) * page + page
    memory = mmap.mmap(-1, total)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + total - page), ctypes.c_size_t(page), 0) == 0
    t = torch.frombuffer(memory, dtype=dtype, count=count, offset=total - page - size)
    return t.fill_(0.5)
for dtype in (torch.float32, torch.bfloat16):
    for n in (1, 3, 7, 63, 257, 1368):
        for step in (1, 2, 3):
            arrays = [at_the_end((n - 1) * step + 1, dtype)[::step] for _ in range(5)]
            native.forward(gate, arrays[0], arrays[1])
            native.backward(gate, *arrays)
        x, dx = at_the_end(2 * n, dtype), at_the_end(2 * n, dtype)
        native.backward(gate, x[::2], x[1::2], x[:n], dx[::2], dx[1::2])
torch.set_num_threads(2)
x = torch.randn(64, 5000)
before = bytes(native.forward(gate, x, x).untyped_storage())
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    print("good")
else:
    # Not torch.equal: torch's own threads are as dead as ours.
    os._exit(0 if bytes(native.forward(gate, x, x).untyped_storage()) == before else 1)
"""
    )
    ((out, err),) = run_alone(script)
    assert out == "good\n", err


@pytest.mark.parametrize("name", MANY)
def test_the_loops_are_vector_instructions(name: str, tmp_path: Path) -> None:
    """GCC says of both loops of arithmetic that it vectorised them."""
    command = native_build._command()
    if "Free Software Foundation" not in subprocess.run([*command, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only GCC reports it")
    source = native_source.native_source(gate(name), list(gate(name).parameters))
    file = tmp_path / "gate.cpp"
    file.write_text(source)
    lines = source.splitlines()
    loops = [i for i, line in enumerate(lines, 1) if "for (int64_t i" in line and "const float g = " in lines[i]]
    assert len(loops) == 2
    flags = [*native_build._FLAGS, "-fopt-info-vec-optimized"]
    done = subprocess.run(
        [*command, *flags, str(file), "-o", str(tmp_path / "gate.so")], capture_output=True, text=True
    )
    for line in loops:
        # Once for each dtype.
        assert done.stderr.count(f"gate.cpp:{line}:") >= 2, f"the loop in line {line} of\n{source}"
