"""What is printed from a formula: Triton bodies that agree, refusals, and nothing built before it is asked for."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import mpmath
import pytest
import sympy
import torch
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.gates import GATES, SCALARS, expr
from tensorformer.gates.torch_source import torch_source
from tensorformer.gates.triton_source import triton_lines
from tests.gates.gate_laws import GATE_NAMES, INF, SCALAR_NAMES, assert_matches_oracle, gate, scalar


def _tensor(value: Tensor | float, like: Tensor | float) -> Tensor:
    dtype = like.dtype if isinstance(like, Tensor) else torch.float32
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)


# What of triton.language the printed lines may use, on torch tensors.
TL = SimpleNamespace(
    PropagateNan=SimpleNamespace(ALL="all"),
    sigmoid=torch.sigmoid,
    exp=lambda a: torch.exp(torch.as_tensor(a)),
    log=torch.log,
    sqrt=torch.sqrt,
    abs=lambda a: torch.abs(torch.as_tensor(a)),
    where=lambda c, a, b: torch.where(c, _tensor(a, b), _tensor(b, a)),
    maximum=lambda a, b, propagate_nan: torch.maximum(_tensor(a, b), _tensor(b, a)),
    minimum=lambda a, b, propagate_nan: torch.minimum(_tensor(a, b), _tensor(b, a)),
)


def execute(lines: list[str], **variables: Any) -> dict:
    scope = {"tl": TL, **variables}
    exec("\n".join(lines), scope)
    return scope


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_triton_body_of_a_scalar(name: str) -> None:
    f = scalar(name)
    x = torch.tensor(
        [-100, -20, -9, -5, -1.3, -0.1, -0.0, 0.0, 1e-3, 0.2, 0.7, 2.5, 4.0, 9, 100, 3.4e38, -3.4e38, INF, -INF]
    )
    lines = f.triton_body("x", "y", "d")

    def value(x: Tensor) -> Tensor:
        return torch.as_tensor(execute(lines, x=x, **f.parameters)["y"]).expand(x.shape)

    def derivative(x: Tensor) -> Tensor:
        return torch.as_tensor(execute(lines, x=x, **f.parameters)["d"]).expand(x.shape)

    assert_matches_oracle(value, f, x, rtol=2e-5)
    assert_matches_oracle(derivative, f, x, order=1, rtol=2e-5, atol=3e-6)
    assert value(torch.tensor([float("nan")])).isnan().all()
    assert lines == f.triton_body("x", "y", "d")  # the same text each time: it is a cache key


@pytest.mark.parametrize("name", GATE_NAMES)
def test_triton_body_of_a_gate(name: str) -> None:
    f = gate(name)
    g, u = (t.requires_grad_() for t in torch.randn(2, 500) * 4)
    h = f(g, u)
    dg, du = torch.autograd.grad(h.sum(), (g, u))
    scope = execute(f.triton_body(backward=True), g=g.detach(), u=u.detach(), **f.parameters)
    for printed, exact in (("h", h), ("dg", dg), ("du", du)):
        torch.testing.assert_close(scope[printed], exact.detach(), rtol=1e-5, atol=1e-5)
    forward = execute(f.triton_body(), g=g.detach(), u=u.detach(), **f.parameters)
    torch.testing.assert_close(forward["h"], scope["h"], rtol=2e-6, atol=1e-7)


def test_what_the_bodies_cost() -> None:
    assert GATES["bilinear"].triton_body() == ["h = g*u"]
    assert GATES["bilinear"].triton_body(backward=True) == ["h = g*u", "dg = u", "du = g"]
    swiglu = "\n".join(GATES["swiglu"].triton_body(backward=True))
    assert swiglu.count("tl.sigmoid") == 1
    for name in ("bilinear", "reglu", "swiglu_clamped", "swiglu"):
        text = "\n".join(gate(name).triton_body(backward=True))
        assert ("sigmoid" in text) == name.startswith("swiglu")
        assert "/" not in text


def test_printers_refuse_what_they_do_not_know() -> None:
    class mish(expr.Primitive):
        pattern = r"\mathrm{{mish}}\left({0}\right)"

    for unknown in (mish(expr.x), sympy.sin(expr.x), sympy.gamma(expr.x)):
        with pytest.raises(GateError, match="no torch form of"):
            torch_source(unknown, ["x"])
        with pytest.raises(GateError, match="no Triton form of"):
            triton_lines({"y": unknown}, "t")
    with pytest.raises(GateError, match="no Triton form of the power"):
        triton_lines({"y": expr.x ** sympy.Rational(1, 3)}, "t")


def test_formula_with_an_unknown_name() -> None:
    with pytest.raises(GateError, match=r"'foo' is not defined; known: Phi, cap"):
        expr.parse("x*foo(x)", ())


def test_a_gate_of_ones_own() -> None:
    """The class is the extension point: a formula, limits and a source give everything else."""
    from tensorformer.gates import Scalar

    mine = Scalar("cubic", "x**3 - a*x", ("-oo", "oo"), "here", {"a": "> 0"}).bind(a=2.0)
    assert mine.degree == 3
    assert mine.second_moment == pytest.approx(15 - 4 * 3 + 4)
    x = torch.linspace(-3, 3, 31, dtype=torch.float64)
    assert_matches_oracle(mine, mine, x, rtol=1e-13, atol=1e-14)
    assert_matches_oracle(mine.derivative, mine, x, order=1, rtol=1e-13, atol=1e-14)


def test_oracle_takes_floats_lists_and_tensors() -> None:
    gelu = SCALARS["gelu"]
    # Φ(−9)·(−9), from tables of the normal distribution: 1.128588405953840e-19.
    assert float(gelu.oracle(-9.0)) == pytest.approx(-9 * 1.128588405953840e-19, rel=1e-13)
    assert gelu.oracle([-1.0, 2.0]) == [gelu.oracle(-1.0), gelu.oracle(2.0)]
    assert gelu.oracle(torch.tensor([[-1.0], [2.0]])) == gelu.oracle([-1.0, 2.0])
    assert gelu.oracle(torch.tensor(2.0)) == gelu.oracle(2.0)
    assert float(SCALARS["softcap"].bind(c=30.0).oracle(INF)) == 30.0
    with pytest.raises(GateError, match="plain numbers"):
        SCALARS["swish"].bind(beta=torch.ones(2)).oracle(1.0)


def test_oracle_has_its_digits_in_the_tail() -> None:
    """By integrating the density: erfc through 2 − erfc, SymPy's habit, would leave nine digits here."""
    with mpmath.workdps(60):
        # The density at 16 in front: mpmath's quadrature stops at an absolute error.
        ratio = mpmath.quad(lambda s: mpmath.exp(-16 * s - s * s / 2), [mpmath.mpf(k) / 4 for k in range(41)])
        tail = ratio * mpmath.exp(-128) / mpmath.sqrt(2 * mpmath.pi)
        assert abs(SCALARS["gelu"].oracle(-16.0) / (-16 * tail) - 1) < mpmath.mpf(10) ** -48
        # 1 − σ(400) is e⁻⁴⁰⁰: 174 digits cancel before the first that counts.
        assert abs(SCALARS["sigmoid"].oracle(400.0, order=1) * mpmath.exp(400) - 1) < mpmath.mpf(10) ** -48


def run(code: str) -> str:
    """Run ``code`` in a fresh interpreter, without the hook that checks annotations."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_costs_nothing() -> None:
    out = run(
        "import sys, time, torch\n"
        "before = set(sys.modules); start = time.perf_counter()\n"
        "import tensorformer.gates\n"
        "took = time.perf_counter() - start\n"
        "heavy = {'sympy', 'mpmath', 'scipy', 'triton', 'transformers'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy\n"
        "assert took < 1.0, took\n"
        "tensorformer.gates.GATES['situ'].bind(beta=4.0, linear_beta=None)\n"
        "assert 'sympy' not in sys.modules\n"
    )
    assert out == ""


COMPILED = """
import torch
from tensorformer.gates import GATES
torch.set_num_threads(1)
from tensorformer.gates.examples import EXAMPLES as numbers
limit = torch.tensor(3.0, requires_grad=True)

def every_gate(g, u, limit):
    total = 0
    for name, gate in GATES.items():
        bound = gate.bind(**{n: limit if n == "limit" else numbers[n] for n in gate.needs})
        total = total + bound(g, u)
    return total

for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-1)):
    g, u = (t.to(dtype).requires_grad_() for t in torch.randn(2, 5, 33) * 3)
    compiled = torch.compile(every_gate, fullgraph=True)(g, u, limit)
    eager = every_gate(g, u, limit)
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)
    ours, theirs = (torch.autograd.grad(y.sum(), (g, u, limit)) for y in (compiled, eager))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 10)
    with torch.no_grad():
        alone = torch.compile(every_gate, fullgraph=True)(g, u, limit)
    torch.testing.assert_close(alone, eager, rtol=tolerance, atol=tolerance)
print("compiled")
"""


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    """Nothing is built before: the formulas are parsed and printed while the graph is traced."""
    assert "compiled" in run(COMPILED)
