"""``tensorformer bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class Bench(Options):
    """Measure speed against a peer, both in turn in one run. Needs the extra `peers`."""

    suite: Annotated[Literal["train"], tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """train: a training step of softmax + SwiGLU against transformers' Llama of the same shape."""

    rounds: int = 15
    """Steps timed of each."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, …"""

    def run(self) -> None:
        """Do it."""
        from tensorformer.bench.train import against_llama
        from tensorformer.cli.show import console
        from tensorformer.errors import ConfigError
        from tensorformer.lab.device import pick

        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: write 1 or more")
        for line in against_llama(pick(self.device), self.rounds):
            console.print(line, soft_wrap=True)
