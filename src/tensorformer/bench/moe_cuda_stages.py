"""What the GPU benchmark of experts times: other implementations, and the launches of ours, each by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.bench.gates import EAGER
from tensorformer.bench.moe import LOOP, Layer, Sizes, by_expert, combined, route, unbind_loop
from tensorformer.gates import Gate
from tensorformer.ops.grouped_experts import triton, triton_launch
from tensorformer.ops.grouped_experts.activation import ready
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.triton_rows import Rows

GROUPED = "grouped_mm"

Work = Callable[[], object]
Stages = Mapping[str, Mapping[str, Work]]


def peers(made: Layer, gate: Gate) -> dict[str, Callable[[], Tensor]]:
    """Return experts of the same weights by `F.grouped_mm` and by a loop, with the gate as models write it."""
    x, gate_up, down, *_ = made.operands
    plain = _as_written(gate)

    def grouped() -> Tensor:
        order, token, counts = by_expert(made)
        ends = counts.cumsum(0).int()
        h = plain(*F.grouped_mm(x[token], gate_up, offs=ends).chunk(2, -1))
        return combined(made, F.grouped_mm(h, down, offs=ends), order, token)

    return {GROUPED: grouped, LOOP: lambda: unbind_loop(made, plain)}


def forward_stages(made: Layer, sizes: Sizes, gates: Sequence[Gate]) -> Stages:
    """Return the launches of forward: under "all" those that have no activation in them, then those of each gate."""
    operands, rows, share = _sorted(made)
    x, gate_up, down, weights, *_ = operands
    h = x.new_ones(len(rows.order), down.shape[1])
    out = triton_launch.products(h, down, None, share, rows)
    stages: dict[str, dict[str, Work]] = {
        "all": {
            "route": lambda: route(made.logits, sizes.top_k),
            "sort": lambda: triton.groups_of(operands, made.indices),
            "second products": lambda: triton_launch.products(h, down, None, share, rows),
            "combine": lambda: out.view(*weights.shape, -1).sum(1),
        }
    }
    for gate in gates:
        launch = functools.partial(triton_launch.projections, x, gate_up, None, ready(gate, "gate_up"), rows, None)
        stages[gate.name] = {"first products and activation": launch}
    return stages


def backward_stages(made: Layer, gates: Sequence[Gate]) -> Stages:
    """Return the launches of backward, as `forward_stages` does."""
    operands, rows, share = _sorted(made)
    x, gate_up, down, weights, *_ = operands
    kept, dy = torch.randn_like(gate_up[0, :1].expand(len(rows.order), -1)), made.dy
    d_pre, sent = torch.randn_like(kept), x.new_ones(len(rows.order), down.shape[1])
    d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    out = triton_launch.products(d_pre, gate_up.mT, None, None, rows)
    stages: dict[str, dict[str, Work]] = {
        "all": {
            "weights of the second": lambda: triton_launch.transposed_products(sent, dy, rows, d_down, None, share),
            "weights of the first": lambda: triton_launch.transposed_products(x, d_pre, rows, d_gate_up, None),
            "dx": lambda: triton_launch.products(d_pre, gate_up.mT, None, None, rows),
            "combine": lambda: out.view(*weights.shape, -1).sum(1),
        }
    }
    for gate in gates:
        given = (dy, down, None, kept, share, ready(gate, "gate_up"), rows, torch.empty_like(d_pre), sent.clone(), True)
        stages[gate.name] = {"dh and activation": functools.partial(triton_launch.gradients, *given)}
    return stages


def passes(made: Layer, gates: Sequence[Gate]) -> dict[str, Work]:
    """Return the first products by `F.grouped_mm` alone, and each gate as models write it, on what comes of them."""
    (x, gate_up, *_), rows, _ = _sorted(made)
    xs, ends = x[rows.token], rows.begins[1:].int()
    halves = F.grouped_mm(xs, gate_up, offs=ends).chunk(2, -1)
    return {
        GROUPED: lambda: F.grouped_mm(xs, gate_up, offs=ends),
        **{gate.name: functools.partial(_as_written(gate), *halves) for gate in gates},
    }


def _sorted(made: Layer) -> tuple[Operands, Rows, Tensor]:
    """Return the operands without a graph, the rows sorted by expert, and the routing weight of each."""
    operands = Operands(*(t if t is None else t.detach() for t in made.operands))  # pyright: ignore[reportArgumentType]
    rows = triton.groups_of(operands, made.indices)
    return operands, rows, operands.weights.flatten()[rows.order].float()


def _as_written(gate: Gate) -> Callable[[Tensor, Tensor], Tensor]:
    return functools.partial(EAGER[gate.name], **gate.parameters) if gate.name in EAGER else gate
