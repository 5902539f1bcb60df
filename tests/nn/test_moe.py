"""Mixtures of experts: against a loop over tokens, by their symmetries, with padding and bad numbers, and compiled."""

from __future__ import annotations

import inspect
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from tensorformer.config.schema import Balance, Experts, Learned, MoE, Router
from tensorformer.errors import ConfigError, ShapeError
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.moe import MoE as Layer
from tensorformer.nn.moe import Paths, RoutedExperts
from tensorformer.nn.router import Routing
from tensorformer.ops.grouped_experts import grouped_experts

LEARNED: Any = {"name": "swish_glu", "beta": Learned(1.0)}


def activated(gate: Any, pre: list[Tensor], beta: Tensor | None) -> Tensor:
    """Return h of projections, by formulas of the test's own."""
    name = gate if isinstance(gate, str) else gate["name"]
    if name == "relu2":
        return pre[0].clamp(min=0) ** 2
    g, u = pre
    if name == "bilinear":
        return g * u
    return g * u / (1 + (-g * (1 if beta is None else beta)).exp())


def in_a_loop(layer: Layer, x: Tensor) -> Tensor:
    """Compute the layer token by token and expert by expert."""
    routing, routed, out = layer.router(x), layer.routed, []
    for n in range(len(x)):
        inner = x[n] if layer.latent_in is None else layer.latent_in.weight @ x[n]
        total = torch.zeros_like(inner)
        for e, weight in zip(routing.indices[n].tolist(), routing.weights[n], strict=True):
            pre = inner @ routed.gate_up[e]
            if routed.gate_up_bias is not None:
                pre = pre + routed.gate_up_bias[e]
            beta = None if routed.learned is None else routed.learned["beta"][e]
            width = routed.down.shape[1]
            h = activated(layer.config.routed.gate, list(pre.split(width)), beta)
            written = h @ routed.down[e]
            total = total + weight * (written if routed.down_bias is None else written + routed.down_bias[e])
        y = total if layer.latent_out is None else layer.latent_out.weight @ total
        for shared in layer.shared or ():
            assert isinstance(shared, FeedForward)
            assert layer.config.shared is not None
            pre = [p(x[n]) for p in ([shared.gate_proj] if shared.is_gated else []) + [shared.up_proj]]
            beta = None if shared.learned is None else shared.learned["beta"]
            y = y + shared.down_proj(activated(layer.config.shared.gate, pre, beta))
        out.append(y)
    return torch.stack(out) if out else x.clone()


def made(config: MoE, d: int, seed: int = 0) -> Layer:
    """Return a layer in float64 with large weights, all drawn, so that a mistake shows."""
    layer, draws = Layer(config, d).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=draws, dtype=torch.float64) * 0.7 + 0.1)
    return layer


def tokens(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(layer: Layer, x: Tensor) -> None:
    """Fail unless output and all gradients are the loop's; an expert without a token has a gradient, of zeros."""
    x = x.detach().requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    ours, loop = layer(x), in_a_loop(layer, x)
    torch.testing.assert_close(ours, loop, rtol=1e-11, atol=1e-11 * (1 + largest(loop)))
    dy, all_of_them = torch.randn_like(loop), list(leaves.values())
    found = torch.autograd.grad(ours, all_of_them, dy)
    truth = torch.autograd.grad(loop, all_of_them, dy, allow_unused=True, materialize_grads=True)
    for name, a, b in zip(leaves, found, truth, strict=True):
        error = largest(a - b)
        assert error <= 1e-10 * (1 + largest(b)), f"d{name}: off by {error:.3g}"


def largest(t: Tensor) -> float:
    return float(t.detach().abs().max()) if t.numel() else 0.0


HYBRID = MoE(
    n_experts=5,
    routed=Experts("bilinear", 3),
    router=Router(top_k=2),
    shared=Experts("swiglu", 4),
    n_shared_experts=2,
)
FULL = MoE(
    n_experts=6,
    routed=Experts(LEARNED, 3, bias=True),
    router=Router(top_k=3, scores="sigmoid", routed_scaling_factor=2.5, n_group=3, topk_group=2, bias=True),
    shared=Experts("relu2", 5, bias=True),
    balance=Balance(bias_update_speed=0.1),
    latent=2,
)
BOTH = pytest.mark.parametrize("config", [HYBRID, FULL], ids=["hybrid", "full"])


@given(data=st.data(), n=st.sampled_from([0, 1, 3, 7, 17]), d=st.sampled_from([1, 3, 7]), seed=st.integers(0, 99))
def test_equals_a_loop_over_tokens(data: st.DataObject, n: int, d: int, seed: int) -> None:
    torch.manual_seed(seed)
    n_experts = data.draw(st.sampled_from([1, 3, 7, 13]))
    gates, odd = st.sampled_from(["bilinear", "swiglu", "relu2", LEARNED]), st.sampled_from([1, 3, 7])
    experts = st.builds(Experts, gate=gates, d_ff=odd, bias=st.booleans())
    scores: Any = data.draw(st.sampled_from(["softmax", "sigmoid", "softmax_after_top_k"]))
    config = MoE(
        n_experts=n_experts,
        routed=data.draw(experts),
        router=Router(
            top_k=data.draw(st.integers(1, min(4, n_experts))),
            scores=scores,
            norm_topk_prob=scores == "softmax_after_top_k" or data.draw(st.booleans()),
            routed_scaling_factor=data.draw(st.sampled_from([1.0, 2.5])),
            bias=data.draw(st.booleans()),
        ),
        shared=(shared := data.draw(st.none() | experts)),
        n_shared_experts=data.draw(st.integers(1, 3)) if shared else 1,
        latent=data.draw(st.none() | odd),
        balance=Balance(aux_loss_coef=0.01),  # without it one expert of weight 1 is refused
    )
    check(made(config, d, seed), tokens(n, d, seed))


def test_groups_and_the_loss_free_bias_equal_the_loop_too() -> None:
    layer = made(FULL, 7)
    assert layer.router.correction_bias is not None
    torch.nn.init.normal_(layer.router.correction_bias)
    check(layer, tokens(63, 7))


def bias_that_is_not_weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: RoutedExperts, x: Tensor, routing: Routing) -> Tensor:
        assert self.learned is not None
        assert self.down_bias is not None
        gate = self.activation.bind(beta=self.learned["beta"][:, None, None])
        y = grouped_experts(
            x, self.gate_up, self.down, gate, routing.indices, routing.weights, self.gate_up_bias, impl="fast"
        )
        return y + self.down_bias[routing.indices].sum(1)

    monkeypatch.setattr(RoutedExperts, "forward", forward)


def shared_path_that_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Layer.paths

    def weighted(self: Layer, x: Tensor, real: Tensor | None = None) -> Paths:
        found = paths(self, x, real)
        assert found.shared is not None
        return found._replace(shared=found.shared * found.routing.weights.sum(-1, keepdim=True))

    monkeypatch.setattr(Layer, "paths", weighted)


def experts_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RoutedExperts.forward

    def tiled(self: RoutedExperts, x: Tensor, routing: Routing) -> Tensor:
        turned = [t.reshape(t.shape[1], t.shape[0]).T for t in (routing.indices, routing.weights)]
        return forward(self, x, routing._replace(indices=turned[0], weights=turned[1]))

    monkeypatch.setattr(RoutedExperts, "forward", tiled)


def experts_that_share_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RoutedExperts.forward

    def shared(self: RoutedExperts, x: Tensor, routing: Routing) -> Tensor:
        assert self.learned is not None
        beta = self.learned["beta"]
        with torch.no_grad():
            before = beta.clone()
            beta.copy_(beta.mean())
        y = forward(self, x, routing)
        beta.data = before
        return y

    monkeypatch.setattr(RoutedExperts, "forward", shared)


@pytest.mark.parametrize(
    "broken",
    [
        bias_that_is_not_weighted,
        shared_path_that_is_routed,
        experts_of_other_tokens,
        experts_that_share_one_parameter,
    ],
)
def test_a_layer_that_is_wrong_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(FULL, 7), tokens(17, 7)
    check(layer, x)
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check(layer, x)


@BOTH
def test_derivatives_are_those_of_differences(config: MoE) -> None:
    """First and second ones, by the input and every parameter, through the router's weights as well."""
    layer, x = made(config, 2), tokens(3, 2).requires_grad_()
    names, leaves = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *leaves: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, leaves, strict=True)), (x,))

    assert gradcheck(run, (x, *leaves))
    assert gradgradcheck(run, (x, *leaves), fast_mode=True)


@BOTH
@given(data=st.data())
def test_the_order_of_experts_is_nobodys_business(config: MoE, data: st.DataObject) -> None:
    layer, other, size = made(config, 7), made(config, 7), config.n_experts // config.router.n_group
    groups = data.draw(st.permutations(range(config.router.n_group)))
    order = torch.tensor([g * size + i for g in groups for i in data.draw(st.permutations(range(size)))])
    x = tokens(17, 7, seed=data.draw(st.integers(0, 99)))
    with torch.no_grad():
        for mixture in (layer, other):
            if mixture.router.correction_bias is not None:
                mixture.router.correction_bias.copy_(torch.arange(config.n_experts) * 0.1)
        stacked = [*other.routed.parameters(), *other.router.parameters(), *other.router.buffers()]
        for t in stacked:
            t.copy_(t[order])
        torch.testing.assert_close(other(x), layer(x), rtol=1e-12, atol=1e-12)
        other.router.proj.weight.copy_(layer.router.proj.weight)
        if not torch.equal(order, torch.arange(len(order))):  # the router's rows alone in their old order is another
            assert not torch.allclose(other(x), layer(x))


@BOTH
@given(real=st.lists(st.booleans(), min_size=1, max_size=17))
def test_padding_leaves_the_others_as_they_are_alone(config: MoE, real: list[bool]) -> None:
    layer, mask = made(config, 7), torch.tensor(real)
    x = tokens(len(real), 7)
    alone = layer(x[mask])
    load = None if layer.router.load is None else layer.router.load.clone()
    x[~mask] = torch.nan
    if layer.router.load is not None:
        layer.router.load.zero_()
    routings: list[Routing] = []
    together = layer(x[None], mask[None], routings)[0]
    torch.testing.assert_close(together[mask], alone, rtol=1e-11, atol=1e-11)
    assert len(routings) == 1
    assert routings[0].real is not None
    assert torch.equal(routings[0].real, mask)
    if load is not None and layer.router.load is not None:
        assert torch.equal(layer.router.load, load)


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_stays_with_its_token(config: MoE, bad: float) -> None:
    layer, x = made(config, 7), tokens(17, 7)
    whole = x.clone().requires_grad_()
    y = layer(whole)
    x[5, 2] = bad
    spoilt = x.requires_grad_()
    z = layer(spoilt)
    others = torch.arange(17) != 5
    assert not z[5].isfinite().all()
    torch.testing.assert_close(z[others], y[others], rtol=1e-11, atol=1e-11)
    dy = torch.randn_like(y)
    (a,), (b,) = torch.autograd.grad(z, spoilt, dy), torch.autograd.grad(y, whole, dy)
    torch.testing.assert_close(a[others], b[others], rtol=1e-11, atol=1e-11)


@BOTH
def test_any_shape_and_strides(config: MoE) -> None:
    layer, x = made(config, 6), tokens(12, 6)
    y = layer(x)
    close = torch.testing.assert_close
    close(layer(x.view(2, 3, 2, 6)), y.view(2, 3, 2, 6))
    close(layer(x[4]), y[4])
    close(layer(x[:0].view(0, 3, 6)), y[:0].view(0, 3, 6))
    close(layer(x.view(3, 4, 6).transpose(0, 1)), y.view(3, 4, 6).transpose(0, 1))
    close(layer(x.T.contiguous().T), y)
    close(layer(x[:1].expand(5, 6)), y[:1].expand(5, 6))
    spread = torch.full((12, 13), torch.nan, dtype=torch.float64)
    spread[:, ::2][:, :6] = x
    close(layer(spread[:, ::2][:, :6]), y)
    x = x.clone().requires_grad_()
    layer(x).sum().backward()  # a gradient of stride 0
    assert x.grad is not None
    close(x.grad, torch.autograd.grad(layer(x), x, torch.ones(12, 6, dtype=torch.float64))[0])


@BOTH
def test_what_is_read_is_left_as_it_was(config: MoE) -> None:
    layer, x = made(config, 7).eval(), tokens(17, 7)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    copy = x.clone()
    layer(x.requires_grad_()).sum().backward()
    assert torch.equal(x, copy)
    assert all(torch.equal(t, before[n]) for n, t in layer.state_dict().items())


def test_shared_experts_have_parameters_of_their_own() -> None:
    layer, x = made(HYBRID, 7), tokens(9, 7)
    paths = layer.paths(x)
    assert layer.shared is not None
    first, second = layer.shared
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    assert paths.shared is not None
    torch.testing.assert_close(paths.shared, first(x) + second(x))
    torch.testing.assert_close(paths.routed + paths.shared, layer(x))


def test_routed_and_shared_experts_have_gates_of_their_own() -> None:
    """Without the shared path the hybrid is a polynomial of x, but for the router: of degree two."""
    layer, x = made(HYBRID, 7), tokens(9, 7)
    routed, shared, routing = layer.paths(x)
    torch.testing.assert_close(layer.routed(-3 * x, routing), 9 * routed)
    assert layer.shared is not None
    assert shared is not None
    assert not torch.allclose(sum((s(-3 * x) for s in layer.shared), torch.zeros(())), 9 * shared)


def test_a_latent_layer_projects_what_experts_see_and_not_what_the_router_sees() -> None:
    layer, x = made(FULL, 7), tokens(9, 7)
    assert layer.latent_in is not None
    assert layer.routed.gate_up.shape == (6, 2, 6)
    assert layer.router.proj.weight.shape == (6, 7)
    unseen = torch.linalg.svd(layer.latent_in.weight).Vh[2:].sum(0)  # no expert sees this direction
    routing = layer.router(x)
    inner = layer.latent_in(x)
    torch.testing.assert_close(layer.latent_in(x + unseen), inner)
    assert not torch.allclose(layer.router(x + unseen).logits, routing.logits)


@BOTH
@pytest.mark.parametrize("n", [1, 63])
def test_under_autocast_products_are_in_bfloat16_and_the_router_is_not(config: MoE, n: int) -> None:
    exact, d = made(config, 16), 16
    single = Layer(config, d)
    single.load_state_dict(exact.state_dict())
    x, dy = tokens(n, d), tokens(n, d, seed=1)
    with torch.no_grad():  # the same numbers in all three
        for p, q in zip(exact.parameters(), single.parameters(), strict=True):
            p.copy_(q.copy_(q.bfloat16()))
    x = x.bfloat16().double()
    routings: list[Routing] = []
    seen: list[list[Tensor]] = []
    for layer, mixed in ((exact, False), (single, True)):
        leaf = x.to(next(layer.parameters()).dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            y = layer(leaf, None, routings)
        leaves = [leaf, *layer.parameters()]
        seen.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    assert routings[1].logits.dtype == torch.float32
    assert torch.equal(routings[0].indices, routings[1].indices)
    torch.testing.assert_close(routings[1].logits.double(), routings[0].logits, rtol=1e-5, atol=1e-5)
    assert seen[1][0].dtype == torch.bfloat16
    names = ["y", "x", *(name for name, _ in exact.named_parameters())]
    for name, truth, found in zip(names, *seen, strict=True):
        error = largest(found.double() - truth) / (1e-3 + largest(truth))
        assert error < 0.03, f"{name}: {error:.3g}"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"moe\.routed\.gate: 'polynorm' needs a whole row"):
        Layer(MoE(n_experts=4, routed=Experts("polynorm", 4), router=Router(top_k=2)), 8)
    layer = made(MoE(n_experts=4, routed=Experts("bilinear", 4), router=Router(top_k=2)), 8)
    with pytest.raises(ShapeError, match=r"real is \(2,\) where x has rows \(2, 3\)"):
        inspect.unwrap(Layer.forward)(layer, torch.ones(2, 3, 8, dtype=torch.float64), torch.ones(2, dtype=torch.bool))
