"""``tensorformer generate``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tensorformer.cli.options import Options

if TYPE_CHECKING:
    from tensorformer.lab.generate import Piece

Texts = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")]


@dataclass(frozen=True, kw_only=True)
class Generate(Options):
    """Sample text from a run, printed as it comes."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, such as runs/demo/bilinear/seed-0."""

    prompt: Texts = ()
    """Text to go on from (may be repeated: each gets a text of its own). Default: the beginning of a document."""

    stop: Texts = ()
    """End the text before this one (may be repeated)."""

    tokens: int = 400
    """Most tokens to sample for each prompt."""

    temperature: float = 0.8
    """Above 0 draws at random; 0 always takes the likeliest token."""

    top_p: float = 0.95
    """Draw only from the likeliest tokens that together have this probability."""

    seed: int = 0
    """Of the draws: the same seed gives the same text, whatever other prompts there are."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, …"""

    def run(self) -> None:
        """Do it."""
        from tensorformer.errors import ConfigError
        from tensorformer.lab.device import pick
        from tensorformer.lab.generate import load_run, write_on
        from tensorformer.lab.interrupt import interrupts_noted

        if self.tokens < 1:
            raise ConfigError(f"--tokens {self.tokens}: write 1 or more")
        prompts = self.prompt or ("",)
        for name, text in [("--prompt", p) for p in prompts] + [("--stop", s) for s in self.stop]:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{name}: is not valid UTF-8") from None
        if "" in self.stop:
            raise ConfigError("--stop '': write at least one character")
        model, tokenizer = load_run(self.run_folder, pick(self.device))
        with interrupts_noted() as pressed:
            pieces = write_on(
                model,
                tokenizer,
                prompts,
                self.tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=self.seed,
                stop=self.stop,
                stopped=pressed,
            )
            _print(prompts, pieces)
            interrupted = pressed()
        if interrupted:
            raise SystemExit(130)  # not KeyboardInterrupt, after which main would say that there is something to resume


def _print(prompts: tuple[str, ...], pieces: Iterable[Piece]) -> None:
    """Print each text after its prompt, the first that has not ended as it comes and the others when it is their turn.

    A blank line stands between two.
    """
    waiting, ended, at = list(prompts), [False] * len(prompts), 0
    sys.stdout.write(prompts[0])
    waiting[0] = ""
    for piece in pieces:
        waiting[piece.prompt] += piece.text
        ended[piece.prompt] = piece.last
        while at < len(prompts):
            sys.stdout.write(waiting[at])
            waiting[at] = ""
            if not ended[at]:
                break
            at += 1
            sys.stdout.write("\n" if at == len(prompts) else "\n\n")
        sys.stdout.flush()
