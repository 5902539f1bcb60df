"""Small routers with random weights, for the tests of routing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from tensorformer.config.schema import Router as Config
from tensorformer.nn.router import Router

Scores = Literal["softmax", "sigmoid", "softmax_after_top_k"]
SCORES: list[Scores] = ["softmax", "sigmoid", "softmax_after_top_k"]
SPEED = 0.01  # of the loss-free bias


def made(config: Config, d: int, n_experts: int, speed: float = 0.0, dtype: torch.dtype = torch.float64) -> Router:
    router = Router(config, d, n_experts, speed).to(dtype)
    nn.init.normal_(router.proj.weight, std=1.0)
    if config.bias:
        nn.init.normal_(router.proj.bias)
    return router
