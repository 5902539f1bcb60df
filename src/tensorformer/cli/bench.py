"""``tensorformer bench``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tensorformer.cli.options import Options

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Bench(Options):
    """Measure speed against peers, all in turn in one run."""

    suite: Annotated[
        Literal["train", "gates", "attention", "moe"], tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")
    ]
    """train: a training step of softmax + SwiGLU against transformers' Llama of the same shape (extra `peers`).
    gates: act_and_mul against torch eager and Inductor, and what φ costs in a feed-forward layer.
    attention: linear attention against softmax attention in training, memory and decoding.
    moe: grouped_experts against loops and transformers' experts, and where its time goes (extra `peers`)."""

    rounds: int = 15
    """Turns timed of each."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, …"""

    gate: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """A gate to measure, in the suite gates (may be repeated); a choice of ten where none is named."""

    inductor: bool = True
    """Measure torch.compile too, in the suite gates: some ten seconds of compiling for each line."""

    def run(self) -> None:
        """Do it."""
        from tensorformer.cli.show import console
        from tensorformer.errors import ConfigError
        from tensorformer.lab.device import pick

        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: write 1 or more")
        device = pick(self.device)
        if self.suite != "gates" and (self.gate or not self.inductor):
            raise ConfigError("--gate and --no-inductor belong to the suite gates: leave them out")
        if self.suite != "train" and device.type not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: the suite {self.suite} runs on cpu and cuda")
        for line in self._lines(device):
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _lines(self, device: torch.device) -> Iterator[str]:
        if self.suite == "train":
            from tensorformer.bench.train import against_llama

            return against_llama(device, self.rounds)
        if self.suite == "attention" and device.type == "cuda":
            from tensorformer.bench import attention_cuda

            return attention_cuda.run(device, self.rounds)
        if self.suite == "attention":
            from tensorformer.bench import attention

            return attention.run(self.rounds)
        if self.suite == "moe" and device.type == "cuda":
            from tensorformer.bench import moe_cuda

            return moe_cuda.run(device, self.rounds)
        if self.suite == "moe":
            from tensorformer.bench import moe

            return moe.run(self.rounds)
        if device.type == "cuda":
            from tensorformer.bench import gates_cuda

            return gates_cuda.run(device, self.rounds, gates_cuda.chosen(self.gate))
        from tensorformer.bench import gates

        return gates.run(self.gate, self.rounds, self.inductor)
