"""``tensorformer study ranges``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tensorformer.cli.options import Options
from tensorformer.cli.run_text import run_tokens

if TYPE_CHECKING:  # --help loads no torch
    from torch import Tensor

    from tensorformer.cli.run_text import Tokens
    from tensorformer.gates import Gate
    from tensorformer.study.ranges_result import Ranges as Result


@dataclass(frozen=True, kw_only=True)
class Ranges(Options):
    """Show what goes through every gate of a run, and what int8, fp8, MXFP8 and NVFP4 make of each layer's output.

    Several gates are given the same inputs, so that the figures say what soft caps and clamps buy, and what not.
    """

    run_folder: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="(or --synthetic)")
    ] = None
    """Folder of a run, such as runs/demo/swiglu/seed-0."""

    text: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the run's validation part)")
    ] = ()
    """Files, folders or globs of text to read instead, from their beginning."""

    synthetic: bool = False
    """Measure gates on Gaussian and heavy-tailed random inputs instead of a run's."""

    gate: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME",
            help_behavior_hint="(default: swiglu situ:beta=4,linear_beta=25 bilinear swiglu_clamped:limit=10)",
        ),
    ] = ()
    """Gates to give the same inputs, parameters behind a colon: situ:beta=4,linear_beta=25."""

    tokens: int = 4096
    """Most tokens to measure on."""

    seed: int = 0
    """Of the synthetic inputs."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Write all figures there too."""

    device: str = "auto"
    """Where a run's model computes: auto, cpu, cuda, …"""

    def run(self) -> None:
        """Do it."""
        import msgspec

        from tensorformer.cli.show import console
        from tensorformer.cli.study_ranges_tables import show
        from tensorformer.errors import ConfigError
        from tensorformer.files import write_bytes
        from tensorformer.study.ranges import compared

        if self.tokens < 1:
            raise ConfigError(f"--tokens {self.tokens}: write 1 or more")
        if not 0 <= self.seed < 1 << 62:
            raise ConfigError(f"--seed {self.seed}: write a number from 0 to 2^62 − 1")
        if self.synthetic == (self.run_folder is not None) or (self.synthetic and self.text):
            raise ConfigError("name a run folder such as runs/demo/swiglu/seed-0, or write --synthetic: one of the two")
        gates = [parse_gate(text) for text in self.gate] or compared()
        with console.status("measuring"):
            result = self._synthetic(gates) if self.run_folder is None else self._of_run(self.run_folder, gates)
        if self.json is not None:
            write_bytes(self.json, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        show(result, console)

    def _synthetic(self, gates: list[Gate]) -> Result:
        from tensorformer.study.ranges import synthetic_ranges

        return synthetic_ranges(gates, self.tokens, self.seed)

    def _of_run(self, folder: Path, gates: list[Gate]) -> Result:
        from tensorformer.lab.device import pick
        from tensorformer.lab.generate import load_run
        from tensorformer.lab.record import read_run
        from tensorformer.study.ranges import ranges

        model, tokenizer = load_run(folder, pick(self.device))
        run = read_run(folder)
        tokens = run_tokens(folder, run, tokenizer, self.text, self.tokens)
        return ranges(model, _windows(tokens, run.train.context, self.tokens), gates, str(folder))


def parse_gate(text: str) -> Gate:
    """Return the gate that ``name`` or ``name:key=value,key=value`` names; ``none`` leaves a cap out.

    Raises:
        GateError: no such gate, or a parameter is missing, unknown, no number or out of range.
    """
    from tensorformer.errors import GateError
    from tensorformer.gates import GATES, SCALARS

    name, _, listed = text.partition(":")
    if name not in GATES and name in SCALARS:
        raise GateError(f"--gate {text}: a function of one input; name a gate of two, such as swiglu")
    parameters: dict[str, float | None] = {}
    for pair in filter(None, listed.split(",")):
        key, _, value = pair.partition("=")
        try:
            parameters[key] = None if value == "none" else float(value)
        except ValueError:
            raise GateError(f"--gate {text}: {pair!r} is no number; write {name}:key=number,key=number") from None
    try:
        return GATES[name].bind(**parameters)
    except GateError as e:
        form = f" (as --gate {name}:key=number,key=number)" if name in GATES else ""
        raise GateError(f"--gate {text}: {e}{form}") from None


def _windows(tokens: Tokens, context: int, limit: int) -> Iterator[Tensor]:
    from tensorformer.data.batches import evaluation_windows

    context = min(context, limit, len(tokens) - 1)
    return (inputs for inputs, _ in evaluation_windows(tokens, context, limit))
