"""``tensorformer generate``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class Generate(Options):
    """Sample text from a run, printed as it comes."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, such as runs/demo/bilinear/seed-0."""

    prompt: str = ""
    """Text to go on from. Default: the beginning of a document."""

    tokens: int = 400
    """Most tokens to sample."""

    temperature: float = 0.8
    """Above 0 draws at random; 0 always takes the likeliest token."""

    top_p: float = 0.95
    """Draw only from the likeliest tokens that together have this probability."""

    seed: int = 0
    """Of the draws: the same seed gives the same text."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, …"""

    def run(self) -> None:
        """Do it."""
        from tensorformer.errors import ConfigError
        from tensorformer.lab.device import pick
        from tensorformer.lab.generate import generate, load_run

        if self.tokens < 1:
            raise ConfigError(f"--tokens {self.tokens}: write 1 or more")
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError("--prompt: is not valid UTF-8") from None
        model, tokenizer = load_run(self.run_folder, pick(self.device))
        prompt = [tokenizer.end_of_document, *tokenizer.encode(self.prompt)]
        decoder = tokenizer.decoder()
        sys.stdout.write(self.prompt)
        for token in generate(
            model,
            [int(t) for t in prompt],
            self.tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tokenizer.end_of_document,
            vocab_size=tokenizer.vocab_size,
        ):
            sys.stdout.write(decoder.push(token))
            sys.stdout.flush()
        sys.stdout.write(decoder.finish() + "\n")
        sys.stdout.flush()
