"""``tensorformer study routing``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tensorformer.cli.options import Options
from tensorformer.cli.run_text import run_tokens

if TYPE_CHECKING:  # --help loads no torch
    from tensorformer.config.schema import Run
    from tensorformer.study.routing_result import Run as Measured


@dataclass(frozen=True, kw_only=True)
class Routing(Options):
    """Draw where the attention of runs looks: how much weight, on how many keys, how far back, and who competes.

    Give several runs of one comparison, such as a softmax and a bilinear one, to see them side by side.
    """

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="(one or more)")
    ]
    """Folders of runs, such as runs/demo/swiglu/seed-0."""

    text: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the runs' validation part)")
    ] = ()
    """Files, folders or globs of text to read instead, from their beginning."""

    tokens: int = 16_384
    """Most tokens to read, in windows of up to four training contexts."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("routing")
    """Where routing.html, routing.json and the pictures go."""

    device: str = "auto"
    """Where the models compute: auto, cpu, cuda, …"""

    def run(self) -> None:
        """Do it."""
        import msgspec

        from tensorformer.cli.show import console
        from tensorformer.errors import ConfigError
        from tensorformer.files import write_bytes
        from tensorformer.lab.record import read_run
        from tensorformer.report.routing import write_routing
        from tensorformer.study.routing import routing

        if self.tokens < 2:
            raise ConfigError(f"--tokens {self.tokens}: write 2 or more")
        if not self.folders:
            raise ConfigError("name one or more run folders, such as runs/demo/swiglu/seed-0")
        if len({folder.resolve() for folder in self.folders}) < len(self.folders):
            raise ConfigError("a run is named twice; name each once")
        runs = [read_run(folder) for folder in self.folders]
        if not self.text and any(run.data != runs[0].data for run in runs):
            raise ConfigError("the runs were trained on different text; name one text for all with --text")
        with console.status("measuring"):
            named = zip(self.folders, runs, short_names(self.folders), strict=True)
            measured = [self._measure(folder, run, name) for folder, run, name in named]
            result = routing(measured, ", ".join(self.text) or "the validation part")
            write_bytes(self.out / "routing.json", msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
            page = write_routing(result, self.out)
        for finding in result.findings:
            console.print(finding, soft_wrap=True)
        console.print(f"\nThe page: {page}", soft_wrap=True)

    def _measure(self, folder: Path, run: Run, name: str) -> Measured:
        from tensorformer.data.batches import evaluation_windows
        from tensorformer.errors import ConfigError
        from tensorformer.lab.device import pick
        from tensorformer.lab.generate import load_run
        from tensorformer.study.routing import run_routing, window_length

        model, tokenizer = load_run(folder, pick(self.device))
        tokens = run_tokens(folder, run, tokenizer, self.text, self.tokens)
        context = run.train.context
        try:
            length = window_length(context, min(len(tokens) - 1, self.tokens))
        except ConfigError as e:
            raise ConfigError(f"{folder}: {e}") from None
        batches = (inputs for inputs, _ in evaluation_windows(tokens, length, self.tokens))
        return run_routing(model, batches, context, name)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the parts of the paths that tell them apart: ``bilinear`` of ``runs/pair/bilinear/seed-0``."""
    if len(folders) == 1:
        return ["/".join(folders[0].parts[-2:]) or str(folders[0])]
    parts = [folder.resolve().parts for folder in folders]
    if len({len(p) for p in parts}) > 1:
        return [str(folder) for folder in folders]
    differ = [len(set(at)) > 1 for at in zip(*parts, strict=True)]
    return ["/".join(part for part, kept in zip(p, differ, strict=True) if kept) for p in parts]
