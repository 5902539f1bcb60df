"""The contract of linear attention around its mathematics: operands, errors, memory, dtypes, FLOPs, graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tensorformer.errors import ConfigError, ShapeError
from tensorformer.ops.linear_attention import flops, linear_attention, plan, resolve
from tensorformer.ops.linear_attention.compiled import linear_attention_op
from tests.ops import linear_attention_laws as laws
from tests.ops.linear_attention_laws import Operands, operands, small_tiles


def strided(name: str, x: Tensor) -> Tensor:
    """The same values at other strides: axes of memory reversed, every second element."""
    spread = torch.zeros(*(2 * n for n in reversed(x.shape)), dtype=x.dtype).permute(*range(x.ndim - 1, -1, -1))
    view = spread[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def alike(name: str, x: Tensor) -> Tensor:
    """One row of the batch, and one head, for all: stride 0."""
    return x[:1, :, :1].expand_as(x) if name != "state" else x[:1, :1].expand_as(x)


@pytest.mark.parametrize("change", [strided, alike])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("decay", ["none", "mild"])
def test_any_strides(change: Callable[[str, Tensor], Tensor], chunk: int, decay: str) -> None:
    with small_tiles():
        for batch, heads in ((2, 3), (1, 3), (3, 1)):
            x = operands(19, decay=decay, state=True, batch=batch, heads=heads).map(change)
            contiguous = x.map(lambda _, t: t.contiguous())
            y, s = x.call(linear_attention, chunk=chunk)
            truth = contiguous.call(linear_attention, chunk=chunk)
            laws.assert_near({"y": y, "s": s}, {"y": truth[0], "s": truth[1]}, 1e-14)


def test_expanded_gradient() -> None:
    """`.sum()` hands backward a gradient of stride 0."""
    x = operands(19, state=True).map(lambda _, t: t.requires_grad_())
    named = list(x.named().values())
    with small_tiles():
        y, s = x.call(linear_attention)
        found = torch.autograd.grad(y.sum() + s.sum(), named, retain_graph=True)
        dense = torch.autograd.grad([y, s], named, [torch.ones_like(y), torch.ones_like(s)])
    for a, b in zip(found, dense, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_operands_are_never_written_to(chunk: int) -> None:
    for time in (1, 19):
        x = operands(time, state=True).map(lambda _, t: t.requires_grad_())
        before = x.map(lambda _, t: t.detach().clone()).named()
        with small_tiles():
            y, s = x.call(linear_attention, chunk=chunk)
            dy, ds = torch.randn_like(y), torch.randn_like(s)
            kept = dy.clone(), ds.clone()
            torch.autograd.backward([y, s], [dy, ds])
        assert torch.equal(dy, kept[0])
        assert torch.equal(ds, kept[1])
        for name, t in x.named().items():
            assert torch.equal(t, before[name])
            assert t._version == 0
            assert s.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


@pytest.mark.parametrize("decay", ["none", "mild"])
@pytest.mark.parametrize("time", [64, 500])
@pytest.mark.parametrize("chunk", [1 << 20, 128])
def test_saves_its_operands_and_nothing_else(decay: str, time: int, chunk: int) -> None:
    x = operands(time, (16, 16), decay, state=True).to(torch.float32).map(lambda _, t: t.requires_grad_())
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x.call(linear_attention, chunk=chunk)
    assert sum(saved.values()) <= sum(t.nbytes for t in x.named().values())


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return out


@pytest.mark.parametrize("decay", ["none", "mild"])
@pytest.mark.parametrize("chunk", [1 << 20, 128])
def test_makes_nothing_as_long_as_time_times_features_or_time(decay: str, chunk: int) -> None:
    time, k, v = 1024, 24, 8
    x = operands(time, (k, k), decay, state=False, batch=1, heads=1, value=v)
    leaves = x.to(torch.float32).map(lambda _, t: t.requires_grad_())
    with Largest() as largest:
        y, _ = leaves.call(linear_attention, chunk=chunk, final_state=False)
        y.backward(torch.ones_like(y))
    tile, state = plan.TILE * min(chunk, time), plan.CHUNK * k * k
    assert largest.elements <= max(time * k, tile, state if chunk < time else 0)


# dtypes


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_y_has_the_dtype_of_v_and_the_state_at_least_float32(impl: str, dtype: torch.dtype) -> None:
    for time in (1, 9):
        y, s = operands(time).to(dtype).call(linear_attention, impl=impl)
        assert y.dtype == dtype
        assert s.dtype == torch.promote_types(dtype, torch.float32)


def test_unlike_dtypes_are_promoted() -> None:
    x = operands(9, state=True)
    mixed = x.map(lambda name, t: t.to({"v": torch.bfloat16, "q1": torch.float16}.get(name, torch.float32)))
    y, s = mixed.call(linear_attention)
    assert y.dtype == torch.bfloat16
    assert s.dtype == torch.float32
    want, _ = mixed.map(lambda _, t: t.float()).call(linear_attention)
    assert torch.equal(y, want.bfloat16())


def test_autocast_decides_the_dtype() -> None:
    x = operands(40, state=True).to(torch.float32).map(lambda _, t: t.requires_grad_())
    low = x.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = Operands(x.q, x.k, low.v, x.log_decay, x.state)
        y, s = mixed.call(linear_attention)
        double, _ = operands(5).call(linear_attention)
        y.sum().backward()
    want, state = low.call(linear_attention)
    assert torch.equal(y, want)
    assert torch.equal(s, state)
    assert double.dtype == torch.float64
    assert x.q[0].grad is not None
    assert x.q[0].grad.dtype == torch.float32


def test_the_final_state_is_only_worked_out_where_asked_for() -> None:
    for time in (1, 9):
        x = operands(time)
        y, s = x.call(linear_attention, final_state=False)
        assert s is None
        laws.assert_near({"y": y}, {"y": x.call(linear_attention)[0]})
        assert x.call(linear_attention, final_state=False, impl="reference")[1] is None


# FLOPs


@pytest.mark.parametrize("key_dims", [(8,), (4, 6)], ids=str)
@pytest.mark.parametrize("time", [0, 1, 63, 300])
@pytest.mark.parametrize("chunk", [None, 9, 100, 1 << 20])
@pytest.mark.parametrize("decay", ["none", "mild"])
def test_flops_are_those_counted(key_dims: tuple[int, ...], time: int, chunk: int | None, decay: str) -> None:
    for state in (False, True):
        for final in (False, True):
            x = operands(time, key_dims, decay, state=state, value=7).to(torch.float32)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                x.call(linear_attention, chunk=chunk, final_state=final)
            batch, _, heads, value = x.v.shape
            counted = flops(batch, time, heads, key_dims, value, chunk, initial_state=state, final_state=final)
            assert counted == counter.get_total_flops()


# errors: one line, what was wrong, and what to write


def test_shapes_that_do_not_fit() -> None:
    x = operands(6, state=True)
    (q1, q2), (k1, k2) = x.q, x.k
    for arguments, words in [
        ({"q": q1, "k": (k1, k2), "v": x.v}, "q has 1 branches and k 2: write one tensor each"),
        ({"q": q1, "k": k2, "v": x.v}, r"q has shape \(2, 6, 3, 3\) and k \(2, 6, 3, 4\)"),
        ({"q": (q1, q2), "k": (k1, k1), "v": x.v}, r"q\[1\] has shape .* and k\[1\]"),
        ({"q": q1, "k": k1, "v": x.v[:, :5]}, "first three axes"),
        ({"q": q1, "k": k1, "v": x.v[0]}, r"v has shape \(6, 3, 5\): write it as \(batch, time, heads, features\)"),
        ({"q": q1, "k": k1, "v": x.v, "log_decay": x.v}, r"log_decay has shape .* \(2, 6, 3\)"),
        ({"q": q1, "k": k1, "v": x.v, "state": x.state}, r"state has shape \(2, 3, 12, 5\): .* = \(2, 3, 3, 5\)"),
        ({"q": q1.long(), "k": k1, "v": x.v}, r"q is torch.int64: write .float\(\)"),
        (
            {"q": q1, "k": k1, "v": x.v, "log_decay": torch.zeros(2, 6, 3, dtype=torch.int32)},
            "log_decay is torch.int32",
        ),
    ]:
        for function in (linear_attention, resolve):
            with pytest.raises(ShapeError, match=words) as error:
                function(**arguments)
            assert "\n" not in str(error.value)


def test_implementations_that_do_not_exist() -> None:
    x = operands(6)
    for options, words in [
        ({"impl": "fats"}, "no impl 'fats' of linear_attention; did you mean 'fast'"),
        ({"chunk": 0}, "chunk = 0: write the number of steps"),
        ({"impl": "reference", "chunk": 4}, 'impl "reference" goes step by step, not 4 at once'),
    ]:
        with pytest.raises(ConfigError, match=words):
            x.call(linear_attention, **options)


@pytest.mark.parametrize(("chunk", "form"), [(1, "recurrent"), (8, "chunked"), (30, "quadratic"), (99, "quadratic")])
def test_what_runs_can_be_asked_for(chunk: int, form: str) -> None:
    x = operands(30)
    assert tuple(x.call(resolve, chunk=chunk)) == ("fast", form, chunk)
    assert tuple(x.call(resolve, impl="reference")) == ("reference", "recurrent", 1)


# graphs


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operator_is_registered_properly(final: bool, state: bool, dtype: torch.dtype) -> None:
    x = operands(9, decay="mild" if state else "none", state=state).to(dtype).map(lambda _, t: t.requires_grad_())
    arguments = (x.q, x.k, x.v, x.log_decay, x.state, 4, final, "fast")
    torch.library.opcheck(linear_attention_op, (list(x.q), list(x.k), *arguments[2:]))


COMPILED = """
import torch
from tensorformer.ops.linear_attention import linear_attention

torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 64

def call(q, k, v, log_decay, state):
    return linear_attention(q, k, v * 2, log_decay=log_decay, state=state)

for dynamic in (False, True):
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for time in (5, 150, 151):
        for decayed in (False, True):
            branch = lambda: torch.randn(2, time, 3, 4, requires_grad=True)
            q, k, v = (branch(), branch()), (branch(), branch()), branch()
            log_decay = (-torch.rand(2, time, 3)).requires_grad_() if decayed else None
            state = torch.randn(2, 3, 16, 4, requires_grad=True) if decayed else None
            leaves = [t for t in (*q, *k, v, log_decay, state) if t is not None]
            for low in (False, True):
                results = []
                for function in (call, compiled):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                        y, s = function(q, k, v, log_decay, state)
                    loss = y.float().square().sum() + s.square().sum()
                    results.append([y, s, *torch.autograd.grad(loss, leaves)])
                for eager, graph in zip(*results, strict=True):
                    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
