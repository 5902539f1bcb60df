"""The loss-free bias of a router: what it counts, when, and that it evens the load."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

from tensorformer.config.schema import Router as Config
from tensorformer.nn.router import Router, tokens_per_expert, update_biases
from tests.nn.routers import SCORES, SPEED, Scores, made


def load_of(router: Router) -> list[int]:
    assert router.load is not None
    return router.load.tolist()


def entropy(counts: Tensor) -> float:
    share = counts.double() / counts.sum()
    return torch.special.entr(share).sum().item() / math.log(len(share))


@pytest.mark.parametrize("scores", SCORES)
def test_the_load_grows_even_and_the_bias_keeps_its_mean(scores: Scores) -> None:
    router = made(Config(top_k=2, scores=scores, bias=True), 8, 16, 0.003, torch.float32)
    with torch.no_grad():
        router.proj.weight.mul_(0.1)
        router.proj.bias.copy_(torch.linspace(1, -1, 16))
    x = torch.randn(512, 8)
    entropies = []
    for _ in range(300):
        counts = tokens_per_expert(router(x).indices, 16)[0]
        assert load_of(router) == counts.tolist()
        entropies.append(entropy(counts))
        update_biases(router)
        assert router.correction_bias is not None
        assert abs(router.correction_bias.double().mean().item()) < 1e-7
    assert entropies[0] < 0.5
    assert entropies[-1] > 0.95


def test_one_update_by_hand() -> None:
    router = made(Config(top_k=1), 2, 4, 0.5, torch.float32)
    assert router.load is not None
    assert router.correction_bias is not None
    router.load.copy_(torch.tensor([5, 3, 0, 4]))  # mean 3: signs −1, 0, 1, −1, whose mean is −1/4
    router.update_bias()
    assert router.correction_bias.tolist() == [-0.375, 0.125, 0.625, -0.375]
    assert load_of(router) == [0, 0, 0, 0]
    router.correction_bias.add_(0.1)
    before = router.correction_bias.clone()
    router.update_bias()  # no token since
    assert torch.equal(router.correction_bias, before)


def test_accumulation_gives_the_same_biases() -> None:
    whole, parts = (made(Config(top_k=2), 5, 7, SPEED) for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    for step in range(5):
        x = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        whole(x)
        for part in x.chunk(4):
            parts(part)
        assert load_of(whole) == load_of(parts)
        update_biases(whole)
        update_biases(nn.ModuleList([parts]))
    assert whole.correction_bias is not None
    assert parts.correction_bias is not None
    assert whole.correction_bias.abs().sum() > 0
    assert torch.equal(whole.correction_bias, parts.correction_bias)


def test_evaluation_and_padding_are_not_counted() -> None:
    router, plain = made(Config(top_k=2), 5, 7, SPEED), made(Config(top_k=2), 5, 7)
    x, real = torch.randn(63, 5, dtype=torch.float64), torch.arange(63) % 3 > 0
    router.eval()(x)
    assert sum(load_of(router)) == 0
    routing = router.train()(x, real)
    assert load_of(router) == tokens_per_expert(routing.indices[real], 7)[0].tolist()
    assert sum(load_of(router)) == 84
    router(x[:0])
    assert sum(load_of(router)) == 84
    assert plain.load is plain.correction_bias is None
    assert list(plain.state_dict()) == ["proj.weight"]
    before = {n: p.clone() for n, p in plain.state_dict().items()}
    update_biases(plain)
    assert all(torch.equal(before[n], p) for n, p in plain.state_dict().items())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_does_not_count_twice(use_reentrant: bool) -> None:
    router = made(Config(top_k=2), 5, 7, SPEED)
    x = torch.randn(63, 5, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return router(x).weights.square().sum()

    value: Any = checkpoint(loss, x, use_reentrant=use_reentrant)
    once = load_of(router)
    assert sum(once) == 126
    value.backward()
    assert router.proj.weight.grad is not None
    assert load_of(router) == once
    loss(x).backward()
    assert load_of(router) == [2 * n for n in once]


def test_the_state_is_saved_and_the_bias_stays_wide() -> None:
    router = made(Config(top_k=2), 5, 7, SPEED, torch.float32)
    router(torch.randn(9, 5))
    router.update_bias()
    router(torch.randn(9, 5))
    copy = made(Config(top_k=2), 5, 7, SPEED, torch.float32)
    copy.load_state_dict(router.state_dict())
    assert load_of(copy) == [0] * 7 != load_of(router)  # it is of a step that is not over
    assert router.correction_bias is not None
    assert copy.correction_bias is not None
    assert torch.equal(copy.correction_bias, router.correction_bias)
    wide = router.correction_bias.clone()
    router.to(torch.bfloat16)
    assert router.proj.weight.dtype == torch.bfloat16
    assert torch.equal(router.correction_bias, wide)
    assert router.correction_bias.dtype == torch.float32


def _rank(rank: int, port: int, loads: list[list[int]]) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(loads))
    router = Router(Config(top_k=1), 2, 3, 0.5)
    assert router.load is not None
    assert router.correction_bias is not None
    router.load.copy_(torch.tensor(loads[rank]))
    update_biases(router)
    torch.distributed.destroy_process_group()
    # 6, 5, 4 together: signs −1, 0, 1; each rank alone would say −1, 1, 1 and −1, −1, 1.
    assert router.correction_bias.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.slow
def test_the_load_is_that_of_all_ranks() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    spawn(_rank, (port, [[6, 1, 0], [0, 4, 4]]), nprocs=2)
