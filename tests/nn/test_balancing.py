"""Balancing losses: their closed forms, what padding and order leave alone, and gradients."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.config.schema import Balance, Experts, MoE
from tensorformer.config.schema import Router as Config
from tensorformer.errors import ShapeError
from tensorformer.nn import balancing
from tensorformer.nn.balancing import auxiliary_loss, load_statistics, router_loss, sequence_loss, z_loss
from tensorformer.nn.router import Routing

LOADS: list[Literal["per_token", "per_choice"]] = ["per_token", "per_choice"]


def routing(
    tokens: int, n_experts: int, top_k: int, *, sigmoid: bool = False, padding: bool = False, seed: int = 0
) -> Routing:
    """Return a routing of random logits, in float64; with padding the first token is real."""
    torch.manual_seed(seed)
    logits = torch.randn(tokens, n_experts, dtype=torch.float64)
    real = torch.rand(tokens) < 0.6 if padding else None
    if real is not None:
        real[:1] = True
    return of_logits(logits, top_k, sigmoid=sigmoid, real=real)


def of_logits(logits: Tensor, top_k: int, *, sigmoid: bool = False, real: Tensor | None = None) -> Routing:
    probabilities = logits.sigmoid() if sigmoid else logits.softmax(-1)
    weights, indices = probabilities.topk(top_k)
    return Routing(indices, weights, logits, probabilities, real)


def without_padding(r: Routing) -> Routing:
    assert r.real is not None
    return Routing._make([*(t[r.real] for t in r[:4]), None])


def even(n_experts: int, top_k: int) -> Routing:
    """Return E tokens of which each expert gets k, with even probabilities."""
    indices = (torch.arange(n_experts)[:, None] + torch.arange(top_k)) % n_experts
    logits = torch.zeros(n_experts, n_experts, dtype=torch.float64)
    return Routing(indices, torch.ones(n_experts, top_k), logits, logits.softmax(-1), None)


def collapsed(tokens: int, n_experts: int, top_k: int) -> Routing:
    """Return tokens that all go to the first k experts, and are sure of the first."""
    logits = torch.full((tokens, n_experts), -torch.inf, dtype=torch.float64)
    logits[:, 0] = 0
    indices = torch.arange(top_k).expand(tokens, -1)
    return Routing(indices, torch.ones(tokens, top_k), logits, logits.softmax(-1), None)


def in_a_loop(r: Routing, load: str) -> Tensor:
    """Compute E Σ f P token by token."""
    n_experts, top_k = r.logits.shape[-1], r.indices.shape[-1]
    f, p, tokens = [0.0] * n_experts, torch.zeros(n_experts, dtype=torch.float64), 0
    for n in range(len(r.indices)):
        if r.real is not None and not r.real[n]:
            continue
        tokens += 1
        p = p + r.probabilities[n] / r.probabilities[n].sum()
        for e in r.indices[n].tolist():
            f[e] += 1 / (top_k if load == "per_choice" else 1)
    return n_experts * torch.dot(torch.tensor(f, dtype=torch.float64) / tokens, p / tokens)


def same(a: Tensor, b: Tensor | float) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("load", LOADS)
@given(n_experts=st.sampled_from([1, 3, 7, 63, 257]), top_k=st.integers(1, 8), tokens=st.sampled_from([1, 3, 63]))
def test_closed_forms(load: Any, n_experts: int, top_k: int, tokens: int) -> None:
    k = min(top_k, n_experts)
    scale = k if load == "per_token" else 1
    balanced, one = even(n_experts, k), collapsed(tokens, n_experts, k)
    same(auxiliary_loss([balanced], load), scale)
    same(sequence_loss(balanced, 1, load), scale)
    same(auxiliary_loss([one], load), n_experts * scale / k)  # f of the first expert is 1, or 1/k
    same(sequence_loss(one, tokens, load), n_experts * scale / k)
    same(z_loss(balanced), math.log(n_experts) ** 2)
    same(z_loss(one), 0)
    statistics = load_statistics(balanced)
    for name, value in (("entropy", 1), ("max_over_mean", 1), ("squared_load", 1), ("confidence", 1 / n_experts)):
        same(getattr(statistics, name), value)
    statistics = load_statistics(one)
    entropy = math.log(k) / math.log(n_experts) if n_experts > 1 else 1
    for name, value in (("entropy", entropy), ("max_over_mean", n_experts / k), ("squared_load", n_experts / k)):
        same(getattr(statistics, name), value)
    assert statistics.dead == n_experts - k
    assert statistics.confidence == 1


@pytest.mark.parametrize("load", LOADS)
@given(
    tokens=st.sampled_from([1, 3, 7, 63]),
    n_experts=st.sampled_from([1, 3, 7, 63]),
    top_k=st.integers(1, 4),
    sigmoid=st.booleans(),
    padding=st.booleans(),
    rows=st.sampled_from([1, 3, 7]),
    seed=st.integers(0, 99),
)
def test_equal_a_loop(
    load: Any, tokens: int, n_experts: int, top_k: int, sigmoid: bool, padding: bool, rows: int, seed: int
) -> None:
    k = min(top_k, n_experts)
    r = routing(rows * tokens, n_experts, k, sigmoid=sigmoid, padding=padding, seed=seed)
    same(auxiliary_loss([r], load), in_a_loop(r, load))
    same(sequence_loss(r, 1, load), auxiliary_loss([r], load))
    alone = [Routing(*(None if t is None else t.view(rows, tokens, *t.shape[1:])[i] for t in r)) for i in range(rows)]  # pyright: ignore
    lively = [a for a in alone if a.real is None or a.real.any()]
    same(sequence_loss(r, rows, load), sum((in_a_loop(a, load) for a in lively), torch.zeros(())) / len(lively))
    other = routing(7, n_experts, k, sigmoid=sigmoid, seed=seed + 1)
    both = [r, other] if r.real is None else [r, other._replace(real=torch.ones(7, dtype=torch.bool))]
    joined = Routing(*(None if a is None else torch.cat((a, b)) for a, b in zip(*both, strict=True)))  # pyright: ignore
    same(auxiliary_loss(both, load), in_a_loop(joined, load))


@given(sigmoid=st.booleans(), seed=st.integers(0, 99))
def test_padding_counts_as_if_it_were_not_there(sigmoid: bool, seed: int) -> None:
    padded = routing(63, 7, 3, sigmoid=sigmoid, padding=True, seed=seed)
    assert padded.real is not None
    for values in (padded.logits, padded.probabilities):
        values[~padded.real] = torch.nan  # nothing reads it
    plain = without_padding(padded)
    for load in LOADS:
        same(auxiliary_loss([padded], load), auxiliary_loss([plain], load))
    same(z_loss(padded), z_loss(plain))
    for a, b in zip(load_statistics(padded), load_statistics(plain), strict=True):
        assert torch.equal(a, b) if a.dtype == torch.int64 else torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("empty", [True, False])
def test_no_token_is_no_loss(empty: bool) -> None:
    r = routing(0 if empty else 6, 3, 2)._replace(real=torch.zeros(0 if empty else 6, dtype=torch.bool))
    for values in (auxiliary_loss([r], "per_token"), sequence_loss(r, 3, "per_token"), z_loss(r)):
        assert values == 0
    statistics = load_statistics(r)
    assert statistics.dead == 3
    assert sum(v.sum() for n, v in statistics._asdict().items() if n != "dead") == 0
    if empty:
        assert z_loss(r._replace(real=None)) == 0
        assert auxiliary_loss([r._replace(real=None)], "per_choice") == 0


@given(seed=st.integers(0, 99))
def test_the_order_of_experts_and_of_tokens_does_not_matter(seed: int) -> None:
    r = routing(63, 7, 3, seed=seed)
    experts, tokens = torch.randperm(7), torch.randperm(63)
    place = experts.argsort()
    moved = Routing(place[r.indices], r.weights, r.logits[:, experts], r.probabilities[:, experts], None)
    mixed = Routing._make([*(t[tokens] for t in r[:4]), None])
    for load in LOADS:
        for other in (moved, mixed):
            same(auxiliary_loss([other], load), auxiliary_loss([r], load))
        same(sequence_loss(moved, 9, load), sequence_loss(r, 9, load))
    same(z_loss(moved), z_loss(r))
    torch.testing.assert_close(load_statistics(moved).load, load_statistics(r).load[experts])


def moe(top_k: int = 2, **balance: Any) -> MoE:
    return MoE(n_experts=7, routed=Experts("swiglu", 8), router=Config(top_k=top_k), balance=Balance(**balance))


def losses(logits: Tensor, real: Tensor | None, sigmoid: bool) -> tuple[Tensor, ...]:
    """Return every loss as a function of the logits; what is chosen stays as the first logits have it."""
    r = of_logits(logits, 2, sigmoid=sigmoid, real=real)
    kinds: list[Any] = ["layer", "model", "sequence"]
    tables = [moe(aux_loss=a, aux_loss_coef=0.3, z_loss_coef=0.2) for a in kinds]
    return (
        auxiliary_loss([r, r], "per_token"),
        sequence_loss(r, 3, "per_choice"),
        z_loss(r),
        router_loss([(t, r) for t in tables], 3),
    )


def check_gradients(sigmoid: bool, padding: bool) -> None:
    real = torch.arange(9) % 4 > 0 if padding else None
    logits = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: losses(z, real, sigmoid), (logits,))
    assert torch.autograd.gradgradcheck(lambda z: losses(z, real, sigmoid), (logits,))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_gradients_of_gradients(sigmoid: bool, padding: bool) -> None:
    check_gradients(sigmoid, padding)


def test_a_loss_of_detached_probabilities_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = balancing._shares
    monkeypatch.setattr(balancing, "_shares", lambda r: shares(r).detach())
    with pytest.raises(RuntimeError, match=r"[Jj]acobian|does not require grad"):
        check_gradients(False, False)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_step_against_the_gradient_evens_the_load(sigmoid: bool) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(257, 7) + torch.linspace(1, -1, 7)).requires_grad_()
    before = load_statistics(of_logits(logits, 2, sigmoid=sigmoid))
    for _ in range(40):
        loss = auxiliary_loss([of_logits(logits, 2, sigmoid=sigmoid)], "per_choice")
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= 500 * gradient
    after = load_statistics(of_logits(logits, 2, sigmoid=sigmoid))
    assert after.entropy > before.entropy + 0.02
    assert after.squared_load < before.squared_load
    assert not after.squared_load.requires_grad


def test_a_large_logit_costs_its_square() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = z_loss(of_logits(logits, 1))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 1e8
    assert gradient.tolist() == [[2e4, 0.0, 0.0]]


# Put together.


def test_the_total_is_summed_over_layers() -> None:
    a, b, c = (routing(63, 7, 2, padding=True, seed=s) for s in range(3))
    table = moe(aux_loss_coef=0.5, z_loss_coef=0.25)
    expected = sum(0.5 * auxiliary_loss([r], "per_choice") + 0.25 * z_loss(r) for r in (a, b))
    same(router_loss([(table, a), (table, b)], 9), expected)
    table = moe(aux_loss="sequence", aux_loss_load="per_token", aux_loss_coef=0.5)
    expected = sum(0.5 * sequence_loss(r, 9, "per_token") for r in (a, b))
    same(router_loss([(table, a), (table, b)], 9), expected)
    table, other = moe(aux_loss="model", aux_loss_coef=0.5), moe(aux_loss="model", aux_loss_coef=2.0)
    expected = 0.5 * auxiliary_loss([a, c], "per_choice") + 2 * auxiliary_loss([b], "per_choice")
    same(router_loss([(table, a), (other, b), (table, c)], 9), expected)


def test_without_coefficients_it_is_a_plain_zero() -> None:
    r = routing(63, 7, 2)
    r = of_logits(r.logits.requires_grad_(), 2)
    for layers in ([], [(moe(), r)], [(moe(aux_loss="model", bias_update_speed=0.1), r)]):
        total = router_loss(layers, 9)
        assert total.shape == ()
        assert total.dtype == torch.float32
        assert total == 0
        assert not total.requires_grad
    low = of_logits(r.logits.float(), 2)
    total = router_loss([(moe(aux_loss_coef=0.1, z_loss_coef=0.1), low)], 9)
    assert total.shape == ()
    assert total.dtype == torch.float32


def test_a_token_that_is_not_a_number_shows() -> None:
    r = routing(9, 7, 2)
    r.probabilities[3] = torch.nan
    assert auxiliary_loss([r], "per_choice").isnan()
    assert load_statistics(r).load.isfinite().all()


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ShapeError, match="as many experts and choices each, not no layer"):
        auxiliary_loss([], "per_token")
    with pytest.raises(ShapeError, match="as many experts and choices each, not 2 of 7, 3 of 7"):
        auxiliary_loss([routing(9, 7, 2), routing(9, 7, 3)], "per_token")
    for rows in (0, 2, 10):
        with pytest.raises(ShapeError, match=f"9 tokens can't be {rows} rows of equal length"):
            sequence_loss(routing(9, 7, 2), rows, "per_token")
