"""Experts of a mixture: against other implementations in turn, and where the time goes, stage by stage.

Each figure that has a target says whether it is met. Where laws fail, or the peers compute something else, there is no
figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.bench.turns import keep_memory, medians
from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.gates.examples import example
from tensorformer.ops.grouped_experts import grouped_experts, resolve
from tensorformer.ops.grouped_experts.activation import ready
from tensorformer.ops.grouped_experts.check import Operands
from tensorformer.ops.grouped_experts.fast import groups_of
from tensorformer.ops.grouped_experts.groups import Tile
from tensorformer.ops.grouped_experts.products import products, transposed_products
from tensorformer.ops.grouped_experts.step import Step

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
GATE_NAMES = ("swiglu", "situ", "bilinear")
GATHERED = 1 << 30  # bytes: peers that copy a matrix for each row are left out where they would copy more


class Sizes(NamedTuple):
    """A layer of experts, and how many tokens it gets."""

    tokens: int
    d: int
    d_ff: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, d {self.d}, {self.experts} experts of {self.d_ff}, top {self.top_k}"

    @property
    def flops(self) -> int:
        """Of the three products of a gated expert, forward."""
        return 6 * self.tokens * self.top_k * self.d * self.d_ff


COMPARED = (Sizes(2048, 512, 128, 64, 8), Sizes(2048, 512, 32, 256, 16), Sizes(1, 512, 32, 256, 16))
# The smallest ratio to the best peer, forward+backward, on a CPU, of each of ours.
TARGETS = {
    (COMPARED[0], "ours"): 0.97,
    (COMPARED[1], "ours"): 1.0,
    (COMPARED[2], "ours"): 1.0,
    (COMPARED[0], "native"): 1.2,
    (COMPARED[2], "native"): 1.5,
}
STAGED = (Sizes(2048, 512, 32, 256, 16), Sizes(2048, 512, 128, 64, 8), Sizes(2048, 512, 1024, 8, 2))
LOOP = "unbind loop"
LAW = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Layer(NamedTuple):
    """Operands and routing of one measurement, and dy; leaves that want a gradient."""

    operands: Operands
    indices: Tensor
    logits: Tensor
    dy: Tensor


def run(rounds: int) -> Iterator[str]:
    """Yield the lines of the comparison and of the stages; times are milliseconds, all of a line measured in turn.

    Args:
        rounds: turns timed of each.
    """
    keep_memory()

    def clock(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        return medians(works, rounds)

    rates = {name: _gemm_rate(dtype, clock) for name, dtype in DTYPES.items()}
    told = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in rates.items())
    yield f"{torch.get_num_threads()} threads, torch {torch.__version__}; a product of 2048 × 2048 makes {told}"
    yield "against peers: milliseconds (share of that rate); the ratio is the best peer's time divided by it"
    for sizes in COMPARED:
        for name, dtype in DTYPES.items():
            yield from _against_peers(sizes, name, dtype, rates[name], clock)
    yield ""
    yield "where the time goes, stage by stage: milliseconds (share of the whole)"
    for sizes in STAGED:
        for name, dtype in DTYPES.items():
            for gate in GATE_NAMES:
                yield from _stages(sizes, example(GATES[gate]), name, dtype, clock)


def layer(sizes: Sizes, dtype: torch.dtype, device: str) -> Layer:
    """Draw a layer whose router sends tokens to experts at random."""
    draws = torch.Generator().manual_seed(0)
    tokens, d, d_ff, experts, top_k = sizes

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws)

    x, gate_up, down = drawn(tokens, d), drawn(experts, d, 2 * d_ff) / d**0.5, drawn(experts, d_ff, d) / d_ff**0.5
    logits = drawn(tokens, experts).to(device)
    weights, indices = route(logits, top_k)
    x, gate_up, down, weights = (t.to(device, dtype).requires_grad_() for t in (x, gate_up, down, weights))
    operands = Operands(x, gate_up, down, weights, None, None)
    return Layer(operands, indices, logits, drawn(tokens, d).to(device, dtype))


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return weights that sum to one, and the experts they are of."""
    best, indices = logits.topk(top_k)
    return best.softmax(1), indices


class Peer(NamedTuple):
    """An implementation, and the leaves that its gradients are of: x, the routing weights, gate_up and down."""

    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


def peers(made: Layer, sizes: Sizes) -> dict[str, Peer]:
    """Return SwiGLU experts of the same weights by others: a loop, and transformers' where it is installed."""
    x, gate_up, down, weights, *_ = made.operands
    loop = Peer(lambda: unbind_loop(made, lambda g, u: F.silu(g) * u), (x, weights, gate_up, down))
    return {LOOP: loop, **_transformers(made, sizes)}


def unbind_loop(made: Layer, gate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return y of a loop over experts whose stacked weights are taken apart once."""
    x, gate_up, down, *_ = made.operands
    order, token, counts = by_expert(made)
    each = zip(x[token].split(counts.tolist()), gate_up.unbind(), down.unbind(), strict=True)
    outs = [gate(*(rows @ first).chunk(2, -1)) @ second for rows, first, second in each]
    return combined(made, torch.cat(outs), order, token)


def by_expert(made: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Return the choices sorted by expert, the token of each, and how many each expert has."""
    flat = made.indices.flatten()
    order = flat.argsort(stable=True)
    return order, order // made.indices.shape[1], torch.bincount(flat, minlength=len(made.operands.gate_up))


def combined(made: Layer, out: Tensor, order: Tensor, token: Tensor) -> Tensor:
    """Return the sum over a token's choices of what experts wrote for them, weighted."""
    shares = made.operands.weights.flatten()[order, None]
    return torch.zeros_like(made.operands.x).index_add(0, token, out * shares)


def _transformers(made: Layer, sizes: Sizes) -> dict[str, Peer]:
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    except ImportError:
        return {}
    x, gate_up, down, weights, *_ = made.operands
    found: dict[str, Peer] = {}
    for name in ("eager", "batched_mm", "grouped_mm"):
        if name == "batched_mm" and sizes.flops // 2 * x.element_size() > GATHERED:
            continue
        shape: dict[str, Any] = {"hidden_size": sizes.d, "intermediate_size": sizes.d_ff}
        config = MixtralConfig(num_local_experts=sizes.experts, num_experts_per_tok=sizes.top_k, **shape)
        config._experts_implementation = name
        experts: Any = MixtralExperts(config).to(x.device, x.dtype)
        with torch.no_grad():
            experts.gate_up_proj.copy_(gate_up.mT)
            experts.down_proj.copy_(down.mT)
        leaves = (x, weights, experts.gate_up_proj, experts.down_proj)
        found[f"transformers {name}"] = Peer(lambda e=experts: e(x, made.indices, weights), leaves)
    return found


Clock = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]


def _gemm_rate(dtype: torch.dtype, clock: Clock) -> float:
    """Return the FLOP a second of one large product, the most that this machine does."""
    side = 2048
    a, b, out = (torch.randn(side, side).to(dtype) for _ in range(3))
    return 2 * side**3 / clock({"product": lambda: torch.mm(a, b, out=out)})["product"]


def _against_peers(sizes: Sizes, name: str, dtype: torch.dtype, rate: float, clock: Clock) -> Iterator[str]:
    made = layer(sizes, dtype, "cpu")
    x, gate_up, down, weights, *_ = made.operands
    others = peers(made, sizes)

    def ours(impl: str) -> Peer:
        leaves = (x, weights, gate_up, down)
        return Peer(lambda: grouped_experts(x, gate_up, down, "swiglu", made.indices, weights, impl=impl), leaves)

    mine, label = {"ours": ours("fast")}, f"  {name}, {sizes}"
    try:
        resolve(x, gate_up, down, "swiglu", made.indices, weights, impl="native")
        mine["native"] = ours("native")
    except ConfigError as reason:
        yield f"{label}: without native: {reason}"
    everyone = {**others, **mine}
    if fault := _disagreement(everyone, made):
        yield f"{label}: no result: {fault}"
        return
    for way, factor in (("forward", 1), ("forward+backward", 3)):
        seconds = clock({n: closed(peer.call, peer.leaves, made.dy, factor == 3) for n, peer in everyone.items()})
        best = min(seconds[n] for n in others)
        parts = [f"{n} {seconds[n] * 1e3:.2f}" for n in others]
        for n in mine:
            told = f"{n} {seconds[n] * 1e3:.2f} ({factor * sizes.flops / seconds[n] / rate:.0%}, ratio"
            goal = TARGETS.get((sizes, n)) if way != "forward" else None
            met = "" if goal is None else f", {'met' if best / seconds[n] >= goal else 'short of'} {goal}"
            parts.append(f"{told} {best / seconds[n]:.2f}{met})")
        yield f"{label}, {way}: {' · '.join(parts)}"


def closed(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], dy: Tensor, backward: bool) -> Callable[[], object]:
    """Return what is timed: forward alone without a graph, or the gradients of ``leaves``."""
    if backward:
        return lambda: torch.autograd.grad(call(), leaves, dy)
    return torch.no_grad()(call)


def _disagreement(everyone: Mapping[str, Peer], made: Layer) -> str | None:
    """Say who is furthest from the loop in float64, if anyone is too far, in y or in a gradient."""
    x, gate_up, down, weights = (t.detach().double().requires_grad_() for t in made.operands.given())
    y = grouped_experts(x, gate_up, down, "swiglu", made.indices, weights, impl="reference")
    truth = (y, *torch.autograd.grad(y, (x, weights, gate_up, down), made.dy.double()))
    for name, peer in everyone.items():
        y = peer.call()
        for what, a, exact in zip(
            ("y", "dx", "dweights", "dgate_up", "ddown"), (y, *torch.autograd.grad(y, peer.leaves, made.dy)), truth,
            strict=True,
        ):  # fmt: skip
            turned = a.mT if a.dim() == 3 and name.startswith("transformers") else a
            error = ((turned.double() - exact).abs().max() / exact.abs().max()).item()
            if not error <= LAW[made.dy.dtype]:
                return f"{what} of {name} is {error:.1e} off"
    return None


def _stages(sizes: Sizes, gate: Gate, name: str, dtype: torch.dtype, clock: Clock) -> Iterator[str]:
    """Yield the stages of forward and of backward, each run over all tiles by itself."""
    made = layer(sizes, dtype, "cpu")
    with torch.no_grad():
        ways = {"forward": _forward_stages(made, sizes, gate), "backward": _backward_stages(made, gate)}
        for way, stages in ways.items():
            seconds = clock(stages)
            whole = sum(seconds.values())
            parts = [f"{n} {s * 1e3:.2f} ({s / whole:.0%})" for n, s in seconds.items()]
            yield f"  {name}, {sizes}, {gate.name}, {way}: {' · '.join(parts)}"


def _forward_stages(made: Layer, sizes: Sizes, gate: Gate) -> dict[str, Callable[[], object]]:
    x, gate_up, down, weights, *_ = made.operands
    groups, activation = groups_of(made.operands, made.indices), ready(gate, "gate_up")
    rows, tiles = len(groups.order), groups.tiles
    xs, out = x.new_empty(rows, sizes.d), x.new_empty(rows, sizes.d)
    pre, share = x.new_empty(rows, gate_up.shape[2]), weights.flatten()[groups.order, None]
    torch.index_select(x, 0, groups.token, out=xs)
    _each(tiles, lambda t: products(t, xs[t.rows], gate_up, pre[t.rows]))
    h = Step(activation, pre, None).value() * share
    y = torch.zeros_like(x, dtype=made.operands.wide)
    return {
        "route": lambda: route(made.logits, sizes.top_k),
        "sort": lambda: groups_of(made.operands, made.indices),
        "gather": _over(tiles, lambda t: torch.index_select(x, 0, groups.token[t.rows], out=xs[t.rows])),
        "first product": _over(tiles, lambda t: products(t, xs[t.rows], gate_up, pre[t.rows])),
        "gate": _over(tiles, lambda t: Step(activation, pre[t.rows], None).value().mul_(share[t.rows])),
        "second product": _over(tiles, lambda t: products(t, h[t.rows], down, out[t.rows])),
        "combine": _over(tiles, lambda t: y.index_add_(0, groups.token[t.rows], out[t.rows].to(y.dtype))),
    }


def _backward_stages(made: Layer, gate: Gate) -> dict[str, Callable[[], object]]:
    x, gate_up, down, weights, *_ = made.operands
    groups, activation = groups_of(made.operands, made.indices), ready(gate, "gate_up")
    rows, tiles = len(groups.order), groups.tiles
    xs, dys = x[groups.token], made.dy[groups.token]
    pre, d_pre = torch.randn_like(gate_up[0, :1].expand(rows, -1)), x.new_empty(rows, gate_up.shape[2])
    share = weights.flatten()[groups.order, None]
    h, dh = Step(activation, pre, None).value(), x.new_empty(rows, down.shape[1])
    _each(tiles, lambda t: products(t, dys[t.rows], down.mT, dh[t.rows]))
    dx, out = torch.zeros_like(x, dtype=made.operands.wide), x.new_empty(rows, x.shape[1])
    d_first, d_second = torch.empty_like(gate_up), torch.empty_like(down)
    Step(activation, pre, None).pull(dh, d_pre, {})

    def activate(t: Tile) -> None:
        step = Step(activation, pre[t.rows], None)
        step.value()
        step.pull(dh[t.rows] * share[t.rows], d_pre[t.rows], {})

    return {
        "gather": _over(tiles, lambda t: torch.index_select(made.dy, 0, groups.token[t.rows], out=dys[t.rows])),
        "dh": _over(tiles, lambda t: products(t, dys[t.rows], down.mT, dh[t.rows])),
        "routing weights": _over(tiles, lambda t: torch.linalg.vecdot(dh[t.rows], h[t.rows])),
        "gate": _over(tiles, activate),
        "weights of the second": _over(tiles, lambda t: transposed_products(t, h[t.rows], dys[t.rows], d_second)),
        "weights of the first": _over(tiles, lambda t: transposed_products(t, xs[t.rows], d_pre[t.rows], d_first)),
        "dx": _over(tiles, lambda t: products(t, d_pre[t.rows], gate_up.mT, out[t.rows])),
        "combine": _over(tiles, lambda t: dx.index_add_(0, groups.token[t.rows], out[t.rows].to(dx.dtype))),
    }


def _over(tiles: Sequence[Tile], work: Callable[[Tile], object]) -> Callable[[], object]:
    return lambda: _each(tiles, work)


def _each(tiles: Sequence[Tile], work: Callable[[Tile], object]) -> None:
    with torch.no_grad():
        for tile in tiles:
            work(tile)
