"""``tensorformer bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class Bench(Options):
    """Measure speed against peers, all in turn in one run."""

    suite: Annotated[Literal["train", "gates"], tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """train: a training step of softmax + SwiGLU against transformers' Llama of the same shape (extra `peers`).
    gates: act_and_mul against torch eager and Inductor, and what φ costs in a feed-forward layer."""

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
        if self.suite == "train" and (self.gate or not self.inductor):
            raise ConfigError("--gate and --no-inductor belong to the suite gates: leave them out")
        if self.suite == "gates" and device.type not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: the suite gates runs on cpu and cuda")
        if self.suite == "train":
            from tensorformer.bench.train import against_llama

            lines = against_llama(device, self.rounds)
        elif device.type == "cuda":
            from tensorformer.bench.gates_cuda import chosen, run

            lines = run(device, self.rounds, chosen(self.gate))
        else:
            from tensorformer.bench.gates import run

            lines = run(self.gate, self.rounds, self.inductor)
        for line in lines:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
