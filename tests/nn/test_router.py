"""The router: against a loop over tokens, by its symmetries, with bad numbers, and in a graph."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tensorformer.config.schema import Router as Config
from tensorformer.errors import ConfigError
from tensorformer.nn.router import Router, Routing, count_load_op, first_largest, tokens_per_expert
from tests.nn.routers import SCORES, SPEED, Scores, made


def in_a_loop(routing: Routing, config: Config, bias: list[float] | None) -> tuple[list[list[int]], list[list[float]]]:
    """Choose and weight again, token by token and in Python, from the logits and probabilities of ``routing``."""
    chosen, weighted = [], []
    for logits, probabilities in zip(routing.logits.tolist(), routing.probabilities.tolist(), strict=True):
        after = config.scores == "softmax_after_top_k"
        scores = [s + b for s, b in zip(logits if after else probabilities, bias or [0.0] * len(logits), strict=True)]
        size = len(scores) // config.n_group
        groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
        groups.sort(key=lambda g: -sum(sorted((scores[e] for e in g), reverse=True)[:2]))  # Python's sort is stable
        allowed = sorted(e for g in groups[: config.topk_group] for e in g)
        best = sorted(allowed, key=lambda e: -scores[e])[: config.top_k]
        raw = [math.exp(logits[e]) if after else probabilities[e] for e in best]
        divisor = sum(raw) if after or config.norm_topk_prob else 1.0
        chosen.append(best)
        weighted.append([config.routed_scaling_factor * w / divisor for w in raw])
    return chosen, weighted


def check_against_the_loop(router: Router, x: Tensor) -> None:
    routing = router(x)
    torch.testing.assert_close(routing.logits, nn.functional.linear(x, router.proj.weight, router.proj.bias))
    z = routing.logits
    expected = 1 / (1 + (-z).exp()) if router.config.scores == "sigmoid" else z.exp() / z.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(routing.probabilities, expected)
    bias = None if router.correction_bias is None else router.correction_bias.double().tolist()
    indices, weights = in_a_loop(routing, router.config, bias)
    assert routing.indices.dtype == torch.int64
    assert routing.indices.tolist() == indices
    torch.testing.assert_close(routing.weights, torch.tensor(weights, dtype=x.dtype).view(routing.weights.shape))


@given(data=st.data(), tokens=st.sampled_from([0, 1, 3, 7, 63]), seed=st.integers(0, 999))
def test_equals_a_loop_over_tokens(data: st.DataObject, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    n_group, size = data.draw(st.sampled_from([(1, 1), (1, 7), (1, 63), (2, 1), (3, 3), (4, 2), (7, 9)]))
    topk_group = data.draw(st.integers(1, n_group))
    scores = data.draw(st.sampled_from(SCORES))
    config = Config(
        top_k=data.draw(st.integers(1, topk_group * size)),
        scores=scores,
        norm_topk_prob=scores == "softmax_after_top_k" or data.draw(st.booleans()),
        routed_scaling_factor=data.draw(st.sampled_from([1.0, 2.5])),
        n_group=n_group,
        topk_group=topk_group,
        bias=data.draw(st.booleans()),
    )
    router = made(config, 5, n_group * size, SPEED if data.draw(st.booleans()) else 0.0)
    if router.correction_bias is not None:
        nn.init.normal_(router.correction_bias, std=0.3)
    check_against_the_loop(router, torch.randn(5, tokens, dtype=torch.float64).T)


def test_a_bias_that_leaks_into_the_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    router = made(Config(top_k=2, scores="sigmoid", norm_topk_prob=False), 5, 6, SPEED)
    assert router.correction_bias is not None
    nn.init.normal_(router.correction_bias)
    x = torch.randn(9, 5, dtype=torch.float64)
    check_against_the_loop(router, x)
    forward = Router.forward

    def leaking(self: Router, x: Tensor) -> Routing:
        routing = forward(self, x)
        assert self.correction_bias is not None
        return routing._replace(weights=routing.weights + self.correction_bias[routing.indices])

    monkeypatch.setattr(Router, "forward", leaking)
    with pytest.raises(AssertionError):
        check_against_the_loop(router, x)


def test_groups_are_excluded_also_where_scores_are_negative() -> None:
    """Left out with 0 in place of −∞, an expert of another group would win over the chosen group's."""
    router = made(Config(top_k=2, scores="softmax_after_top_k", n_group=2, topk_group=1, bias=True), 1, 6)
    with torch.no_grad():
        router.proj.weight.zero_()
        router.proj.bias.copy_(torch.tensor([-3.0, -1.0, -2.0, -0.5, -9.0, -9.0]))
    assert router(torch.zeros(1, 1, dtype=torch.float64)).indices.tolist() == [[1, 2]]


@pytest.mark.parametrize("scores", SCORES)
@given(tokens=st.sampled_from([1, 3, 7, 63]), n_experts=st.sampled_from([1, 3, 7, 63, 257]), top_k=st.integers(1, 9))
def test_equal_logits_choose_the_lower_index(scores: Scores, tokens: int, n_experts: int, top_k: int) -> None:
    top_k = min(top_k, n_experts)
    router = made(Config(top_k=top_k, scores=scores), 3, n_experts, dtype=torch.float32)
    nn.init.ones_(router.proj.weight)
    x = torch.randn(tokens, 1).expand(tokens, 3)  # a stride of 0
    assert router(x).indices.tolist() == [list(range(top_k))] * tokens


@pytest.mark.parametrize("scores", SCORES)
def test_saturated_scores_are_told_apart(scores: Scores) -> None:
    router = made(Config(top_k=2, scores=scores), 1, 4, dtype=torch.float32)
    with torch.no_grad():
        router.proj.weight.copy_(torch.tensor([[40.0], [400.0], [20.0], [250.0]]))  # σ is 1 of all of them
    assert router(torch.ones(1, 1)).indices.tolist() == [[1, 3]]
    assert router(-torch.ones(1, 1)).indices.tolist() == [[2, 0]]


@given(
    st.lists(st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan]), min_size=9, max_size=9)),
    st.integers(1, 9),
)
def test_the_largest_are_those_of_a_stable_sort(rows: list[list[float]], k: int) -> None:
    rows = rows * 9  # few rows are sorted, many looked through for equal scores
    scores = torch.tensor(rows).view(-1, 9)
    key: Callable[[float], float] = lambda s: math.inf if math.isnan(s) else s  # noqa: E731
    expected = [sorted(range(9), key=lambda e: (not math.isnan(row[e]), -key(row[e]), e))[:k] for row in rows]
    assert first_largest(scores, k).tolist() == expected
    assert first_largest(scores.T.contiguous().T, k).tolist() == expected


@pytest.mark.parametrize("scores", SCORES)
def test_permuting_experts_permutes_everything(scores: Scores) -> None:
    router = made(Config(top_k=3, scores=scores, bias=True), 5, 7, SPEED)
    assert router.correction_bias is not None
    nn.init.normal_(router.correction_bias, std=0.1)
    x, order = torch.randn(63, 5, dtype=torch.float64), torch.randperm(7)
    before = router(x)
    with torch.no_grad():
        for values in (router.proj.weight, router.proj.bias, router.correction_bias):
            values.copy_(values[order])
    after = router(x)
    assert torch.equal(order[after.indices], before.indices)
    for name in ("weights", "logits", "probabilities"):
        old = getattr(before, name)
        torch.testing.assert_close(getattr(after, name), old if name == "weights" else old[:, order])


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("norm", [True, False])
def test_gradients_of_gradients(scores: Scores, norm: bool) -> None:
    if scores == "softmax_after_top_k" and not norm:
        return
    router = made(Config(top_k=2, scores=scores, norm_topk_prob=norm, routed_scaling_factor=1.5, bias=True), 3, 4)
    x = torch.randn(5, 3, dtype=torch.float64)
    w, b = (p.detach().requires_grad_() for p in (router.proj.weight, router.proj.bias))

    def f(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routing = torch.func.functional_call(router, {"proj.weight": w, "proj.bias": b}, (x,))
        return routing.weights, routing.logits, routing.probabilities

    assert torch.autograd.gradcheck(f, (x.requires_grad_(), w, b))
    assert torch.autograd.gradgradcheck(f, (x, w, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_float32_whatever_autocast_says(dtype: torch.dtype) -> None:
    router = made(Config(top_k=2), 257, 7, dtype=torch.float32)
    x = torch.randn(63, 257).to(dtype)
    exact = nn.functional.linear(x.double(), router.proj.weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    for values in (routing.logits, routing.probabilities):
        assert values.dtype == torch.float32
    torch.testing.assert_close(routing.logits.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
    assert routing.weights.dtype == dtype
    routing.weights.float().square().sum().backward()
    assert router.proj.weight.grad is not None
    narrow = router.to(torch.bfloat16)(x)
    assert narrow.logits.dtype == torch.float32


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
def test_a_token_that_is_not_finite_disturbs_no_other(scores: Scores, bad: float, groups: tuple[int, int]) -> None:
    router = made(Config(top_k=3, scores=scores, n_group=groups[0], topk_group=groups[1]), 5, 9)
    x = torch.randn(7, 5, dtype=torch.float64)
    clean = router(x)
    x[2, 1] = bad
    routing = router(x)
    others = torch.arange(7) != 2
    for name in ("indices", "weights", "logits", "probabilities"):
        assert torch.equal(getattr(routing, name)[others], getattr(clean, name)[others])
    chosen = routing.indices[2].tolist()
    assert len(set(chosen)) == 3
    assert all(0 <= e < 9 for e in chosen)
    if math.isnan(bad):
        assert routing.weights[2].isnan().all()


def test_one_logit_that_is_nan_shows() -> None:
    router = made(Config(top_k=2, scores="sigmoid"), 3, 4)
    with torch.no_grad():
        router.proj.weight[3, 0] = math.nan
    routing = router(torch.randn(5, 3, dtype=torch.float64))
    assert routing.indices[:, 0].tolist() == [3] * 5
    assert routing.weights.isnan().all()


def test_scores_that_all_underflow_give_weights_of_zero() -> None:
    router = made(Config(top_k=2, scores="sigmoid"), 1, 4, dtype=torch.float32)
    nn.init.ones_(router.proj.weight)
    weights = router(torch.full((3, 1), -1000.0)).weights
    assert weights.eq(0).all()
    weights.sum().backward()
    assert router.proj.weight.grad is not None
    assert router.proj.weight.grad.eq(0).all()


@given(tokens=st.sampled_from([0, 1, 7, 63]), rows=st.sampled_from([1, 3, 7]), top_k=st.integers(1, 4))
def test_counts(tokens: int, rows: int, top_k: int) -> None:
    indices, real = torch.randint(5, (rows * tokens, top_k)), torch.rand(rows * tokens) < 0.6
    expected = torch.zeros(rows, 5, dtype=torch.int64)
    for n, chosen in enumerate(indices.tolist()):
        for e in chosen:
            expected[n // tokens, e] += bool(real[n])
    assert torch.equal(tokens_per_expert(indices, 5, real, rows), expected)
    kept = torch.bincount(indices[real].flatten(), minlength=5)
    assert torch.equal(tokens_per_expert(indices[real], 5)[0], kept)


COMPILED = """
import sys
import torch
from torch.utils.checkpoint import checkpoint
from tensorformer.config import schema
from tensorformer.nn.balancing import router_loss
from tensorformer.nn.router import Router

torch.manual_seed(0)
config = schema.Router(top_k=2, scores="sigmoid", n_group=3, topk_group=2)
router = Router(config, 5, 9, 0.01)
table = dict(n_experts=9, routed=schema.Experts("swiglu", 8), router=config)
balances = [schema.Balance(kind, "per_choice", 0.1, 0.1) for kind in ("layer", "sequence", "model")]
moes = [schema.MoE(**table, balance=b) for b in balances]
x, real = torch.randn(62, 5, requires_grad=True), torch.arange(62) % 3 > 0

def loss(x, real):
    routing = router(x, real)
    return routing.weights.square().sum() + router_loss([(moe, routing) for moe in (*moes, moes[2])], 2)

def inside(x, real):
    return checkpoint(loss, x, real, use_reentrant=False)

compiled = torch.compile(loss, fullgraph=True, backend=sys.argv[1])
runs = {
    "eager": loss,
    "compiled": compiled,
    "recomputed around the graph": lambda *a: checkpoint(compiled, *a, use_reentrant=False),
    "recomputed inside of the graph": torch.compile(inside, fullgraph=True, backend=sys.argv[1]),
}
seen = []
for name, run in runs.items():
    router.load.zero_()
    router.zero_grad()
    value = run(x, real)
    value.backward()
    seen.append((value.detach(), router.proj.weight.grad.clone()))
    assert router.load.sum() == 2 * real.sum(), (name, router.load)
    for a, b in zip(seen[-1], seen[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), name
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend: str) -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED, backend], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_the_count_is_registered_properly() -> None:
    load, counts = torch.zeros(3, dtype=torch.int64), torch.tensor([1, 0, 2])
    torch.library.opcheck(count_load_op, (load, counts))
    assert load.tolist() == [0, 0, 0]


def test_shapes_are_found_without_numbers() -> None:
    config = Config(top_k=2, scores="sigmoid", n_group=3, topk_group=2, bias=True)
    with torch.device("meta"):
        router = Router(config, 5, 9, SPEED)
        routing = router(torch.empty(63, 5, dtype=torch.bfloat16))
    assert [tuple(t.shape) for t in routing[:4]] == [(63, 2), (63, 2), (63, 9), (63, 9)]
    assert [t.dtype for t in routing[:4]] == [torch.int64, torch.bfloat16, torch.float32, torch.float32]


def test_a_router_that_can_not_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.top_k: a token can't go to 5 of 4 experts"):
        Router(Config(top_k=5), 8, 4)
