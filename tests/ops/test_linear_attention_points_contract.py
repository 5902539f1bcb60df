"""The contract around the delta rule, decays a channel and segments: errors, strides, memory, FLOPs, graphs, peers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tensorformer.errors import ConfigError, ShapeError
from tensorformer.ops.linear_attention import flops, linear_attention, plan, resolve
from tensorformer.ops.linear_attention.compiled_general import general_op
from tests.ops import linear_attention_laws as laws
from tests.ops.linear_attention_laws import POINTS, Point, small_tiles
from tests.ops.test_linear_attention_contract import Largest, alike, strided

GENERAL = [p for p in POINTS if p.update == "delta" or p.decay == "channel"]
general_points = pytest.mark.parametrize("point", GENERAL, ids=str)


@pytest.mark.parametrize("change", [strided, alike])
@general_points
def test_any_strides(change: Callable[[str, Tensor], Tensor], point: Point) -> None:
    x = point.operands(13, state=True).map(change)
    contiguous = x.map(lambda _, t: t.contiguous())
    with small_tiles():
        for chunk in (1, 5, 13):
            laws.assert_near(laws.run(linear_attention, x, chunk=chunk), laws.run(laws.reference, contiguous))


@general_points
def test_expanded_gradient(point: Point) -> None:
    x = point.operands(19, state=True).map(lambda _, t: t.requires_grad_())
    named = list(x.named().values())
    with small_tiles():
        y, s = x.call(linear_attention)
        found = torch.autograd.grad(y.sum() + s.sum(), named, retain_graph=True)
        dense = torch.autograd.grad([y, s], named, [torch.ones_like(y), torch.ones_like(s)])
    for a, b in zip(found, dense, strict=True):
        assert torch.equal(a, b)


@general_points
def test_operands_are_never_written_to(point: Point) -> None:
    for time in (1, 19):
        x = point.operands(time, state=True).map(lambda _, t: t.requires_grad_())
        before = x.map(lambda _, t: t.detach().clone()).named()
        with small_tiles():
            y, s = x.call(linear_attention)
            dy, ds = torch.randn_like(y), torch.randn_like(s)
            kept = dy.clone(), ds.clone()
            torch.autograd.backward([y, s], [dy, ds])
        assert torch.equal(dy, kept[0])
        assert torch.equal(ds, kept[1])
        for name, t in x.named().items():
            assert torch.equal(t, before[name])
            assert t._version == 0


def test_gradient_of_only_one_output() -> None:
    for point in GENERAL:
        x = point.operands(20, state=True).map(lambda _, t: t.requires_grad_())
        named = list(x.named().values())
        for output in (0, 1):
            with small_tiles():
                found = torch.autograd.grad(x.call(linear_attention, chunk=6)[output].sum(), named)
            truth = torch.autograd.grad(x.call(laws.reference)[output].sum(), named, allow_unused=True)
            for a, want in zip(found, truth, strict=True):
                torch.testing.assert_close(a, torch.zeros_like(a) if want is None else want, rtol=0, atol=1e-12)


def test_no_steps() -> None:
    for point in POINTS:
        for state in (False, True):
            x = point.operands(0, state=state)
            x.segments = torch.zeros(2, 0, dtype=torch.int64)
            for impl in ("fast", "reference"):
                y, s = x.call(linear_attention, impl=impl)
                assert y.shape == x.v.shape
                assert torch.equal(s, torch.zeros_like(s) if x.state is None else x.state)


# memory


@pytest.mark.parametrize("chunk", [None, 1])
@general_points
def test_saves_its_operands_and_a_state_every_64_steps(point: Point, chunk: int | None) -> None:
    x = point.operands(200, batch=1, heads=2).to(torch.float32).map(lambda _, t: t.requires_grad_())
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, s = x.call(linear_attention, chunk=chunk)
    assert sum(saved.values()) <= sum(t.nbytes for t in x.named().values()) + 4 * s.nbytes


@general_points
def test_makes_nothing_that_grows_faster_than_time(point: Point) -> None:
    """The largest tensor is an operand, the states that are kept, one a span, or what one span needs."""
    time, k, v = 640, 6, 8
    dims = (k * k,) if point.degree == 1 else (k, k)
    x = point.operands(time, key_dims=dims, batch=1, heads=1, value=v).to(torch.float32)
    leaves = x.map(lambda _, t: t.requires_grad_())
    with Largest() as largest:
        y, _ = leaves.call(linear_attention, final_state=False)
        y.backward(torch.ones_like(y))
    states = time // plan.BLOCK * k * k * v
    rows = 2 * plan.SPAN * plan.BLOCK
    assert largest.elements <= max(states, time * max(*dims, v), rows * max(k * k, plan.BLOCK))


# numerics


@pytest.mark.parametrize("kind", ["mild", "strong", "resets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@general_points
def test_error_budget(point: Point, dtype: torch.dtype, kind: str) -> None:
    dims = (16,) if point.degree == 1 else (8, 6)
    x = point.operands(131, key_dims=dims, kind=kind, state=True, batch=1, heads=2, value=16)
    laws.keeps_the_error_budget(linear_attention, x, dtype)


@pytest.mark.parametrize("rate", [-1e-4, -5.0, -20.0, -1000.0])
@pytest.mark.parametrize("point", [p for p in GENERAL if p.decay != "none"], ids=str)
def test_decay_of_any_strength_at_every_step(point: Point, rate: float) -> None:
    """−20 a step over a chunk is e^(−1280): shifting the exponents alone would overflow."""
    x = point.operands(70, state=True, batch=1, heads=2)
    x = x.map(lambda name, t: t + rate if name.startswith("log_decay") else t)
    laws.equals_the_recurrence(linear_attention, x)
    laws.keeps_the_error_budget(linear_attention, x, torch.float32)


def test_unlike_channels_side_by_side() -> None:
    """A channel that forgets at once beside one that keeps everything: no common shift would serve both."""
    for point in (Point(1, "channel", "delta"), Point(2, "channel", "additive")):
        x = point.operands(64, state=True)
        scale = torch.tensor([0.0, 60.0, 0.01, 20.0, 1.0], dtype=torch.float64)
        x = x.map(lambda name, t, s=scale: t * s[: t.shape[-1]] if name.startswith("log_decay") else t)
        laws.equals_the_recurrence(linear_attention, x)
        laws.keeps_the_error_budget(linear_attention, x, torch.float32)


def test_resets_have_finite_values_and_gradients() -> None:
    for point in GENERAL:
        if point.decay != "none":
            x = point.operands(90, kind="resets", state=True)
            for chunk in (40, 90):
                found = laws.run(linear_attention, x, chunk=chunk)
                assert all(t.isfinite().all() for t in found.values())


def test_uninitialised_memory_is_never_read() -> None:
    cases = [p.operands(t, state=s, batch=1) for p in GENERAL for t in (1, 13) for s in (False, True)]
    with small_tiles():
        clean = [laws.run(linear_attention, x, chunk=6) for x in cases]
        torch.use_deterministic_algorithms(True)
        try:
            poisoned = [laws.run(linear_attention, x, chunk=6) for x in cases]
        finally:
            torch.use_deterministic_algorithms(False)
    for found, truth in zip(poisoned, clean, strict=True):
        laws.assert_near(found, truth, 0.0)


# dtypes


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_y_has_the_dtype_of_v_and_the_state_at_least_float32(impl: str, dtype: torch.dtype) -> None:
    for point in POINTS:
        for time in (1, 9):
            x = point.operands(time, state=True).to(dtype)
            x.segments = torch.zeros(2, time, dtype=torch.int32)
            y, s = x.call(linear_attention, impl=impl)
            assert y.dtype == dtype
            assert s.dtype == torch.promote_types(dtype, torch.float32)


def test_autocast_decides_the_dtype() -> None:
    for point in POINTS:
        x = point.operands(20, state=True).to(torch.float32).map(lambda _, t: t.requires_grad_())
        low = x.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = x.map(lambda name, t, v=low.v: v if name == "v" else t)
            y, s = mixed.call(linear_attention)
            y.sum().backward()
        want, state = low.call(linear_attention)
        assert torch.equal(y, want)
        assert torch.equal(s, state)
        assert x.q[0].grad is not None
        assert x.q[0].grad.dtype == torch.float32


# FLOPs


@pytest.mark.parametrize("time", [0, 1, 150])
@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_flops_are_those_counted(point: Point, time: int, chunk: int | None) -> None:
    def solve(a: Any, b: Any, **_: Any) -> int:
        return a[0] * a[1] ** 2 * b[2]

    key_dims = (8,) if point.degree == 1 else (4, 6)
    mapping = {torch.ops.aten.linalg_solve_triangular: solve}
    for state in (False, True):
        for final in (False, True):
            x = point.operands(time, key_dims=key_dims, state=state, value=7).to(torch.float32)
            with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
                x.call(linear_attention, chunk=chunk, final_state=final)
            batch, _, heads, value = x.v.shape
            sizes = (batch, time, heads, key_dims, value, chunk)
            switches: Any = {"decay": point.decay, "update": point.update}
            counted = flops(*sizes, **switches, initial_state=state, final_state=final)
            assert counted == counter.get_total_flops()


# errors


def test_operands_that_do_not_fit() -> None:
    x = Point(2, "channel", "delta").operands(6)
    arguments: dict[str, Any] = {"q": x.q, "k": x.k, "v": x.v}
    one, two = x.channel_decay
    heads = r"2 heads of queries and 3 of v: write as many for v, or a multiple"
    for change, words in [
        ({"log_decay": one}, r"log_decay has shape \(2, 6, 3, 3\): .* \(2, 6, 3\), .* pair of .*\(2, 6, 3, 4\)"),
        ({"log_decay": (two, one)}, "one a channel, a pair of"),
        ({"q": x.q[0], "k": x.k[0], "log_decay": x.channel_decay}, r"or one a channel, \(2, 6, 3, 3\)"),
        ({"log_decay": (one, two.long())}, r"log_decay\[1\] is torch.int64"),
        ({"beta": x.v}, r"beta has shape .* \(2, 6, 3\)"),
        ({"beta": torch.ones(2, 6, 3, dtype=torch.bool)}, r"beta is torch.bool: write .float\(\)"),
        ({"segments": torch.zeros(2, 5, dtype=torch.int64)}, r"segments has shape \(2, 5\): .* \(2, 6\)"),
        ({"segments": torch.zeros(2, 6)}, r"segments is torch.float32: write .long\(\); -1 is padding"),
        ({"q": x.q[0][:, :, :2], "k": x.k[0][:, :, :2]}, heads),
        ({"q": (x.q[0][:, :, :1], x.q[1]), "k": (x.k[0][:, :, :1], x.k[1])}, "first three axes"),
        ({"q": (x.q[0], x.q[1][:, :, :1]), "k": (x.k[0], x.k[1][:, :, :1])}, "first three axes"),
    ]:
        for function in (linear_attention, resolve):
            with pytest.raises(ShapeError, match=words) as error:
                function(**arguments | change)
            assert "\n" not in str(error.value)


def test_an_update_that_does_not_exist() -> None:
    x = Point(1, "none", "delta").operands(6)
    x.update = "dleta"
    for function in (linear_attention, resolve):
        with pytest.raises(ConfigError, match="no update 'dleta' of linear_attention; did you mean 'delta'"):
            x.call(function)


# peers


@pytest.mark.real
@pytest.mark.parametrize("chunked", [False, True])
def test_gated_delta_rule_of_transformers(chunked: bool) -> None:
    """Qwen3-Next's own functions: they normalise nothing here, and scale queries by K^-½."""
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    function = peer.torch_chunk_gated_delta_rule if chunked else peer.torch_recurrent_gated_delta_rule
    x = Point(1, "head", "delta").operands(150, key_dims=(16,), state=True, value=8).to(torch.float32)
    leaves = x.map(lambda _, t: t.requires_grad_())

    def theirs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor, **_: Any) -> Any:
        return function(q * 4, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True)

    want = laws.run(theirs, leaves)
    laws.assert_near(laws.run(linear_attention, leaves), want, 1e-5)


# graphs


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("point", [Point(1, "head", "delta"), Point(2, "channel", "additive")], ids=str)
def test_operator_is_registered_properly(point: Point, final: bool, dtype: torch.dtype) -> None:
    x = point.operands(9, state=final).to(dtype).map(lambda _, t: t.requires_grad_())
    decays = [*x.channel_decay] if x.log_decay is None else [x.log_decay]
    operands = [*x.q, *x.k, x.v, *decays, *([] if x.beta is None else [x.beta])]
    form = (point.degree, len(decays), x.beta is not None)
    torch.library.opcheck(general_op, (operands, x.state, *form, 4, final, True))


COMPILED = """
import torch
from tensorformer.ops.linear_attention import linear_attention

torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 64

def call(q, k, v, log_decay, state, beta, update, segments):
    return linear_attention(q, k, v * 2, log_decay, state, beta=beta, update=update, segments=segments)

def unit():
    return torch.nn.functional.normalize(torch.randn(2, time, 3, 4), dim=-1).requires_grad_()

for dynamic in (False, True):
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for time in (5, 150, 151):
        for update, per in (("delta", "head"), ("additive", "channel"), ("delta", "channel")):
            q, k, v = (unit(), unit()), (unit(), unit()), unit()
            log_decay = (-torch.rand(2, time, 3)).requires_grad_()
            if per == "channel":
                log_decay = tuple((-torch.rand(2, time, 3, 4)).requires_grad_() for _ in q)
            decays = log_decay if per == "channel" else (log_decay,)
            state = torch.randn(2, 3, 16, 4, requires_grad=True)
            beta = torch.rand(2, time, 3, requires_grad=True)
            segments = (torch.arange(time) // 40).expand(2, time) if per == "channel" else None
            results = []
            for function in (call, compiled):
                y, s = function(q, k, v, log_decay, state, beta, update, segments)
                loss = y.square().sum() + s.square().sum()
                results.append([y, s, *torch.autograd.grad(loss, [*q, *k, v, *decays, state, beta])])
            for eager, graph in zip(*results, strict=True):
                torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                y, _ = compiled(q, k, v, log_decay, state, beta, update, segments)
            torch.testing.assert_close(y, results[0][0], rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
