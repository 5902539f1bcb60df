"""A training step against transformers' Llama: same shape, same weights, same batch, same optimiser, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

from tensorformer.bench.peers import llama_like, llama_shape
from tensorformer.config.schema import AdamW, Cosine, Train
from tensorformer.lab.optim import make_optimizers
from tensorformer.lab.train import training_step
from tensorformer.nn.model import TensorTransformer

BATCH, CONTEXT, WARM_UPS, LAW = 16, 256, 3, 1e-4


class _Logits(nn.Module):
    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.peer(tokens).logits


def against_llama(device: torch.device, rounds: int) -> Iterator[str]:
    """Time training steps of both models in turn; yield the lines of the result.

    Refuses to report if the two do not agree on the first loss and gradient norm to 1e-4.
    """
    for precision in ("float32", "bf16"):
        config = Train(
            tokens=BATCH * CONTEXT,
            context=CONTEXT,
            batch_size=BATCH,
            optimizer=AdamW(lr=1e-3),
            schedule=Cosine(warmup_steps=0),
            precision=precision,
        )
        ours = TensorTransformer(llama_shape()).to(device)
        models = {"tensorformer": ours, "transformers": _Logits(llama_like(ours)).to(device)}
        steppers = {name: make_optimizers(m, config.optimizer) for name, m in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        firsts: dict[str, tuple[float, float]] = {}
        draws = torch.Generator().manual_seed(0)
        for round_ in range(WARM_UPS + rounds):
            tokens = torch.randint(256, (BATCH, CONTEXT + 1), generator=draws).to(device)
            order = list(models) if round_ % 2 else list(models)[::-1]
            for name in order:
                began = time.perf_counter()
                result = training_step(models[name], steppers[name], tokens[:, :-1], tokens[:, 1:], config)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if round_ >= WARM_UPS:
                    times[name].append(time.perf_counter() - began)
                firsts.setdefault(name, (result.loss, result.grad_norm))
        a, b = firsts["tensorformer"], firsts["transformers"]
        if precision == "float32" and max(abs(x / y - 1) for x, y in zip(a, b, strict=True)) > LAW:
            yield f"{precision}: no result: the models disagree (loss and gradient norm {a} against {b})"
            continue
        seconds = {name: statistics.median(t) for name, t in times.items()}
        speed = {name: BATCH * CONTEXT / s for name, s in seconds.items()}
        yield (
            f"{precision}: tensorformer {speed['tensorformer']:,.0f} tokens/s, "
            f"transformers Llama {speed['transformers']:,.0f} tokens/s, "
            f"ratio {speed['tensorformer'] / speed['transformers']:.2f}"
        )
