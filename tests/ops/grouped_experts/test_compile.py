"""Graphs: the registered operators, and `torch.compile` without a break."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, SCALARS, Gate
from tensorformer.ops.grouped_experts.activation import ready
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.compiled import (
    grouped_experts_backward_op,
    grouped_experts_in_graph,
    grouped_experts_op,
)
from tests.ops.grouped_experts.expert_laws import draw

BOUND = {
    "swiglu": (2, ("gate_up", "swiglu", [], [], [], [])),
    "situ": (2, ("interleaved", "situ", ["linear_beta"], [25.0], ["beta"], [torch.rand(3, 1, 4) + 1])),
    "relu2": (1, ("gate_up", "relu2", [], [], [], [])),
}


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("biases", [False, True])
def test_operators_are_registered_properly(name: str, biases: bool) -> None:
    halves, bound = BOUND[name]
    case = draw(7, 3, 2, 5, 4, biases=biases, halves=halves, dtype=torch.float32)
    operands = [None if t is None else t.requires_grad_() for t in case.operands]
    torch.library.opcheck(grouped_experts_op, (*operands, case.indices, *bound, True, "fast"))
    plain = [None if t is None else t.detach() for t in operands]
    kept = grouped_experts_op(*plain, case.indices, *bound, True, "fast")[1]
    needed = [t is not None for t in operands] + [True for _ in bound[-1]]
    torch.library.opcheck(grouped_experts_backward_op, (case.dy, kept, *plain, case.indices, *bound, needed, "fast"))


def test_what_a_graph_cannot_hold() -> None:
    case = draw(7, 3, 2, 5, 4, dtype=torch.float32)
    own = Gate("own", SCALARS["tanh"], SCALARS["identity"], "here")
    fake = Gate("swiglu", SCALARS["tanh"], SCALARS["identity"], "here")
    for gate in (own, fake):
        with pytest.raises(ConfigError, match=r"takes gates of the catalogue, and '(own|swiglu)' is not one"):
            grouped_experts_in_graph(Operands(*case.operands), case.indices, ready(gate, "gate_up"), "fast")  # pyright: ignore
    assert GATES["swiglu"].gate.formula != fake.gate.formula


COMPILED = """
import sys
import torch
from tensorformer.gates import GATES
from tensorformer.ops.grouped_experts import grouped_experts

torch.manual_seed(0)
E, k, d, f = 5, 2, 8, 4
beta = (torch.rand(E, 1, f) + 1).requires_grad_()

def call(x, gate_up, down, weights, bias, indices, gate):
    return grouped_experts(x * 2, gate_up, down, gate, indices, weights, down_bias=bias) + 1

for gate, halves in (("swiglu", 2), (GATES["situ"].bind(beta=beta, linear_beta=None), 2), ("relu2", 1)):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=sys.argv[1])
    for tokens in (6, 9):
        for dtype in (torch.float32, torch.bfloat16):
            shapes = ((tokens, d), (E, d, halves * f), (E, f, d), (tokens, k), (E, d))
            operands = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
            indices = torch.rand(tokens, E).topk(k).indices
            leaves = [*operands, beta] if not isinstance(gate, str) else operands
            results = []
            for run in (call, compiled):
                y = run(*operands, indices, gate)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
                with torch.no_grad():
                    assert torch.allclose(run(*operands, indices, gate), y)
            for eager, graph in zip(*results, strict=True):
                assert graph.dtype == eager.dtype
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                assert (graph - eager).abs().max() <= tolerance * eager.abs().max(), (gate, dtype)
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend: str) -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED, backend], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
