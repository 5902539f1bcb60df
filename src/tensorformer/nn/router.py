"""Which experts each token goes to, with which weights, and the bias that evens their load without a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.check_moe import check_router
from tensorformer.gates.kernel import PLAIN, transforming
from tensorformer.ops.autocast import autocast_dtype

LEAST_SUM = 1e-20  # DeepSeek's, added to a sum that divides: scores that all underflow give 0 then, not 0/0
FEW_ROWS = 8  # below them looking for equal scores takes longer than sorting


@final
class Routing(NamedTuple):
    """What a router decided for N tokens.

    Attributes:
        indices: (N, k) int64, the chosen experts, all different, the best first.
        weights: (N, k), how much each of them counts, in the dtype of x.
        logits: (N, E), in float32 or better.
        probabilities: (N, E), of all experts: the sigmoid of the logits, else their softmax.
        real: (N,) bool, False at padding; None where there is none.
    """

    indices: Tensor
    weights: Tensor
    logits: Tensor
    probabilities: Tensor
    real: Tensor | None


@final
class Router(nn.Module):
    """Token-choice routing: every token goes to the ``top_k`` experts with the largest scores, and none is dropped.

    With logits z = x Wᵀ (+ b), the weights of a token's chosen experts are, before ``routed_scaling_factor``:

    - "softmax": softmax(z) there, divided by its sum there if ``norm_topk_prob`` (Shazeer et al. 2017, arXiv
      1701.06538; Mixtral, Qwen3-MoE);
    - "sigmoid": σ(z) there, likewise (DeepSeek-V3, arXiv 2412.19437);
    - "softmax_after_top_k": the softmax of the chosen logits (gpt-oss).

    Chosen are the largest logits, the lower index first where they are equal. With groups or a loss-free bias it is the
    largest probabilities instead (for "softmax_after_top_k" still logits). With ``n_group`` > 1 only experts of the
    ``topk_group`` best groups can be chosen, where a group is as good as the sum of its two best. The loss-free bias
    (arXiv 2408.15664) is added for choosing and for nothing else.

    Logits are computed in float32 or better, whatever x and autocast are. NaN counts as the largest score, so that
    it shows in its token's weights; other tokens do not see it.

    Args:
        config: how to choose and to weight.
        d_model: width of x.
        n_experts: E.
        bias_update_speed: step of the loss-free bias; 0 leaves the bias and the counts for it out.

    Raises:
        ConfigError: such a choice can't be made of so many experts.
    """

    correction_bias: Tensor | None
    load: Tensor | None

    def __init__(self, config: schema.Router, d_model: int, n_experts: int, bias_update_speed: float = 0.0) -> None:
        super().__init__()
        check_router(config, n_experts, "router")
        self.config, self.n_experts, self.bias_update_speed = config, n_experts, bias_update_speed
        self.proj = nn.Linear(d_model, n_experts, bias=config.bias)
        balanced = bias_update_speed > 0
        self.register_buffer("correction_bias", torch.zeros(n_experts) if balanced else None)
        counts = torch.zeros(n_experts, dtype=torch.int64) if balanced else None
        self.register_buffer("load", counts, persistent=False)  # of one optimiser step: no checkpoint falls into it

    def forward(self, x: Float[Tensor, "n d"], real: Bool[Tensor, " n"] | None = None) -> Routing:
        """Route ``x``.

        While training with a loss-free bias it also counts the load: tokens that are not padding, and not again
        where activation checkpointing recomputes the layer inside a backward pass. Compiled code does the same.

        Args:
            x: (N, d) of any float dtype; N may be 0.
            real: (N,) False at padding, which is routed too, but counts in no load and no loss.
        """
        logits = self._logits(x)
        probabilities = logits.sigmoid() if self.config.scores == "sigmoid" else logits.softmax(-1)
        indices = self._choose(logits, probabilities)
        if self.config.scores == "softmax_after_top_k":
            weights = logits.gather(-1, indices).softmax(-1)
        else:
            weights = probabilities.gather(-1, indices)
            if self.config.norm_topk_prob:
                weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        if self.config.routed_scaling_factor != 1:
            weights = weights * self.config.routed_scaling_factor
        weights = weights.to(x.dtype)
        if self.training and self.load is not None:
            counts = tokens_per_expert(indices, self.n_experts, real)[0]
            (count_load_op if torch.compiler.is_compiling() else _count_load)(self.load, counts)
        return Routing(indices, weights, logits, probabilities, real)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raise the bias of experts with less than the mean load, lower that of the others, and count anew.

        b ← b + speed · sign(mean load − load), less its mean, so that it can't drift. The load is that of all ranks,
        each of which must call this (and in DistributedDataParallel count its own: ``broadcast_buffers=False``).
        Nothing changes where no token was counted.

        Source: Wang et al. 2024 (arXiv 2408.15664).
        """
        if self.correction_bias is None or self.load is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.load)
        total = self.load.sum()
        moved = self.correction_bias.double() + self.bias_update_speed * (total - self.n_experts * self.load).sign()
        self.correction_bias.copy_(torch.where(total > 0, moved - moved.mean(), self.correction_bias))
        self.load.zero_()

    def _logits(self, x: Tensor) -> Tensor:
        weight, bias = self.proj.weight, self.proj.bias
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        plain = autocast_dtype(x.device) is None
        with contextlib.nullcontext() if plain else torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))

    def _choose(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        top_k, n_group = self.config.top_k, self.config.n_group
        if self.correction_bias is None and n_group == 1:
            # The order of probabilities, without those ties that rounding and saturation make.
            return first_largest(logits.detach(), top_k)
        scores = (logits if self.config.scores == "softmax_after_top_k" else probabilities).detach()
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if n_group > 1:
            grouped = scores.unflatten(-1, (n_group, -1))
            best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool)
            allowed.scatter_(-1, first_largest(best, self.config.topk_group), True)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        return first_largest(scores, top_k)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # ``model.bfloat16()`` would round the bias to steps larger than its own: it stays as it was.
        before = self.correction_bias
        super()._apply(fn, recurse)
        if before is not None and self.correction_bias is not None and self.correction_bias.itemsize < 4:
            self.correction_bias = before.to(self.correction_bias.device)
        return self


def update_biases(model: nn.Module) -> None:
    """Let every router of ``model`` update its bias: once an optimiser step, after all its micro-batches."""
    for module in model.modules():
        if isinstance(module, Router):
            module.update_bias()


def first_largest(scores: Float[Tensor, "n e"], k: int) -> Int[Tensor, "n k"]:
    """Return the places of the ``k`` largest scores, the largest first; of equal ones the lower, and NaN is largest.

    It is a stable sort's answer. On a CPU ``topk`` has it too, several times as fast, for rows without equal scores.
    """
    few = len(scores) < FEW_ROWS or scores.device.type != "cpu"
    if few or torch.compiler.is_compiling() or type(scores) not in PLAIN or transforming():
        return _sorted(scores)[:, :k]
    values, places = scores.topk(min(k + 1, scores.shape[-1]))
    tied = (values[:, :-1] > values[:, 1:]).all(-1).logical_not_().nonzero()[:, 0]
    if len(tied):
        places[tied] = _sorted(scores[tied])[:, : places.shape[-1]]
    return places[:, :k]


def _sorted(scores: Tensor) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices


def tokens_per_expert(
    indices: Int[Tensor, "n k"], n_experts: int, real: Bool[Tensor, " n"] | None = None, rows: int = 1
) -> Int[Tensor, "rows e"]:
    """Return how many of the choices fell on each expert, in each of ``rows`` equal parts of the tokens.

    Args:
        indices: (N, k), the chosen experts.
        n_experts: E.
        real: (N,) False at padding, which is not counted.
        rows: how many parts; it divides N.

    Returns:
        (rows, E) int64.
    """
    ones = torch.ones_like(indices) if real is None else real[:, None].expand_as(indices).long()
    first = torch.arange(rows, device=indices.device).mul_(n_experts)
    places = indices.reshape(rows, -1) + first[:, None]
    counts = indices.new_zeros(rows * n_experts)
    return counts.scatter_add_(0, places.flatten(), ones.flatten()).view(rows, n_experts)


def _count_load(load: Tensor, counts: Tensor) -> None:
    if torch._C._current_graph_task_id() == -1:  # else a backward pass is on, and recomputes what was counted
        load.add_(counts)


# In a graph the question must be asked when it runs, not when it is traced.
count_load_op = torch.library.custom_op(
    "tensorformer::count_load", _count_load, mutates_args=("load",), schema="(Tensor(a!) load, Tensor counts) -> ()"
)
