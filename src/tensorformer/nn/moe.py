"""A mixture of experts: many routed ones, of which a token meets a few, beside shared ones that it always meets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.activations import feed_forward_activation, is_gated, learned_parameters
from tensorformer.config.check_moe import check_moe
from tensorformer.config.row_activations import RowActivation
from tensorformer.errors import ShapeError
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.router import Router, Routing
from tensorformer.ops.grouped_experts import grouped_experts


class Paths(NamedTuple):
    """What the two paths of a mixture write, and how tokens were routed."""

    routed: Float[Tensor, "n d"]
    shared: Float[Tensor, "n d"] | None
    routing: Routing


class RoutedExperts(nn.Module):
    """Experts in stacked matrices, each a feed-forward part: E_e(x) = (φ(x G_e) · ψ(x U_e)) D_e, or f(x A_e) D_e.

    ``gate_up`` (E, d, 2·d_ff) holds G and U of an expert in one matrix, of a function f of one variable (E, d, d_ff)
    its A; ``down`` is (E, d_ff, d). A learned parameter of the gate is one number an expert.

    Args:
        config: gate, width and biases.
        n_experts: how many.
        width: of input and output.
    """

    def __init__(self, config: schema.Experts, n_experts: int, width: int) -> None:
        super().__init__()
        activation = feed_forward_activation(config)
        assert not isinstance(activation, RowActivation)  # check_moe refuses them
        self.activation = activation
        projected = config.d_ff * (2 if is_gated(activation) else 1)
        self.gate_up = nn.Parameter(torch.empty(n_experts, width, projected))
        self.down = nn.Parameter(torch.empty(n_experts, config.d_ff, width))
        self.gate_up_bias = nn.Parameter(torch.zeros(n_experts, projected)) if config.bias else None
        self.down_bias = nn.Parameter(torch.zeros(n_experts, width)) if config.bias else None
        learned = {n: nn.Parameter(torch.full((n_experts,), v)) for n, v in learned_parameters(config).items()}
        self.learned = nn.ParameterDict(learned) if learned else None

    def forward(self, x: Float[Tensor, "n w"], routing: Routing) -> Float[Tensor, "n w"]:
        """Return what the experts of each token write, weighted and summed."""
        activation = self.activation
        if self.learned is not None:
            activation = activation.bind(**{name: p[:, None, None] for name, p in self.learned.items()})
        # On a CPU not "auto": with or without a native kernel built, a run that is resumed must have the same bits.
        impl = "fast" if x.device.type == "cpu" else "auto"
        return grouped_experts(
            x, self.gate_up, self.down, activation, routing.indices, routing.weights, self.gate_up_bias, self.down_bias,
            impl=impl,
        )  # fmt: skip


class MoE(nn.Module):
    """y = Σ_j w_j · E_{i_j}(x) + Σ_s S_s(x): the routed experts a token was sent to, weighted, and the shared ones.

    Routed and shared experts have gates of their own: with bilinear routed experts and SwiGLU shared ones, nearly all
    weights form third-order tensors, and every token still passes a path that is no polynomial. Experts of a latent
    width work on a projection of x, and what they write is projected back; the router sees x itself.

    Args:
        config: the ``kind = "moe"`` table of a recipe.
        d_model: width of the input and the output.
    """

    def __init__(self, config: schema.MoE, d_model: int) -> None:
        super().__init__()
        check_moe(config, "moe")
        self.config = config
        self.router = Router(config.router, d_model, config.n_experts, config.balance.bias_update_speed)
        self.routed = RoutedExperts(config.routed, config.n_experts, config.latent or d_model)
        shared = config.shared
        part = None if shared is None else schema.FeedForward(gate=shared.gate, d_ff=shared.d_ff, bias=shared.bias)
        several = range(config.n_shared_experts)
        self.shared = None if part is None else nn.ModuleList(FeedForward(part, d_model) for _ in several)
        self.latent_in = nn.Linear(d_model, config.latent, bias=False) if config.latent else None
        self.latent_out = nn.Linear(config.latent, d_model, bias=False) if config.latent else None

    def forward(
        self,
        x: Float[Tensor, "*shape d"],
        real: Bool[Tensor, "*shape"] | None = None,
        routings: list[Routing] | None = None,
    ) -> Float[Tensor, "*shape d"]:
        """Return the output for every row of ``x`` on its own.

        Args:
            x: the input.
            real: which rows are tokens: padding is computed as well, and counts in no load and no loss. None: all are.
            routings: a list to which how tokens were routed is appended: what the losses of balance are taken of. Under
                activation checkpointing take ``use_reentrant=False``: the other kind cuts them off from the gradient.

        Raises:
            ShapeError: ``real`` is of another shape than the rows of x.
        """
        if real is not None and real.shape != x.shape[:-1]:
            raise ShapeError(f"real is {tuple(real.shape)} where x has rows {tuple(x.shape[:-1])}; make them the same")
        paths = self.paths(x.reshape(-1, x.shape[-1]), None if real is None else real.flatten())
        if routings is not None:
            routings.append(paths.routing)
        y = paths.routed if paths.shared is None else paths.routed + paths.shared
        return y.view(x.shape)

    def paths(self, x: Float[Tensor, "n d"], real: Bool[Tensor, " n"] | None = None) -> Paths:
        """Return what routed and shared experts write, each by themselves, and the routing."""
        routing = self.router(x, real)
        inner = x if self.latent_in is None else self.latent_in(x)
        routed = self.routed(inner, routing)
        if self.latent_out is not None:
            routed = self.latent_out(routed)
        shared = None
        for part in self.shared or ():
            shared = part(x) if shared is None else shared + part(x)
        return Paths(routed, shared, routing)
