"""Graphs: the registered operators, and `torch.compile` without a break."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, SCALARS, Gate
from tensorformer.ops.act_and_mul.compiled import act_and_mul_backward_op, act_and_mul_in_graph, act_and_mul_op
from tests.gates.gate_laws import gate

GATES_AND_NUMBERS = [("swiglu", [], []), ("situ", ["beta"], [4.0]), ("situ", ["beta", "linear_beta"], [4.0, 25.0])]


@pytest.mark.parametrize(("name", "names", "values"), GATES_AND_NUMBERS, ids=str)
@pytest.mark.parametrize("layout", ["interleaved", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_are_registered_properly(
    name: str, names: list[str], values: list[float], layout: str | None, dtype: torch.dtype
) -> None:
    operands = [torch.randn(3, 8).to(dtype).requires_grad_() for _ in range(1 if layout else 2)]
    others = (layout, "fast", name, names, values)
    torch.library.opcheck(act_and_mul_op, (operands, *others))
    dh = torch.randn(3, 4 if layout else 8).to(dtype)
    plain = [x.detach() for x in operands]
    torch.library.opcheck(act_and_mul_backward_op, (dh, plain, *others))


@pytest.mark.parametrize("layout", ["up_gate", None])
def test_the_operator_is_the_formula(layout: str | None) -> None:
    operands = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(1 if layout else 2)]
    f = gate("situ")

    def by_formula(*operands: torch.Tensor) -> torch.Tensor:
        if layout:
            u, g = operands[0].chunk(2, -1)
            return f(g, u)
        return f(*operands)

    h, formula = act_and_mul_in_graph(operands, f, layout, "fast"), by_formula(*operands)
    torch.testing.assert_close(h, formula)
    found, truth = (torch.autograd.grad(y.square().sum(), operands) for y in (h, formula))
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_graph_cannot_hold() -> None:
    x = torch.randn(3, 8)
    own = Gate("own", SCALARS["tanh"], SCALARS["identity"], "here")
    with pytest.raises(ConfigError, match=r"takes gates of the catalogue, and 'own' is not one: write impl=\"auto\""):
        act_and_mul_in_graph([x], own, "gate_up", "native")
    fake = Gate("swiglu", SCALARS["tanh"], SCALARS["identity"], "here")
    with pytest.raises(ConfigError, match="'swiglu' is not one"):
        act_and_mul_in_graph([x], fake, "gate_up", "native")
    learned = GATES["situ"].bind(beta=torch.ones(4), linear_beta=None)
    with pytest.raises(ConfigError, match=r"beta of 'situ' is a tensor: write impl=\"auto\""):
        act_and_mul_in_graph([x], learned, "gate_up", "native")


COMPILED = """
import sys
import torch
from tensorformer.gates import GATES
from tensorformer.ops.act_and_mul import act_and_mul

backend, impl, kinds = sys.argv[1:]
torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 64
beta = torch.rand(7, requires_grad=True)
situ = GATES["situ"]
GATES_TRIED = ["swiglu", situ.bind(beta=4.0, linear_beta=None), situ.bind(beta=beta, linear_beta=25.0)]

def one(x, gate, impl):
    return act_and_mul(x * 2, gate, layout="gate_up", impl=impl) + 1

def two(x, gate, impl):
    return act_and_mul(x.chunk(2, -1), gate, impl=impl)

for gate in GATES_TRIED if impl != "native" else GATES_TRIED[:2]:
    for dynamic in (False, True) if kinds == "both" else (True,):
        torch._dynamo.reset()
        for call in (one, two):
            compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
            for rows in (5, 9) if dynamic else (5,):
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.randn(rows, 14).to(dtype).requires_grad_()
                    leaves = [x, beta] if gate is GATES_TRIED[2] else [x]
                    results = []
                    for f in (call, compiled):
                        y = f(x, gate, impl)
                        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
                    for eager, graph in zip(*results, strict=True):
                        assert graph.dtype == eager.dtype
                        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                        worst = (graph - eager).abs().max() / eager.abs().max()
                        assert worst < tolerance, (impl, gate, dynamic, dtype, worst)
print("same")
"""


def compiled(*arguments: str) -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    command = [sys.executable, "-c", COMPILED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_one_graph() -> None:
    compiled("aot_eager", "auto", "dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["auto", "native"])
def test_one_graph_through_inductor(impl: str) -> None:
    compiled("inductor", impl, "both")
