"""``tensorformer study numerics``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tensorformer.cli.options import Options, Overrides

if TYPE_CHECKING:
    from tensorformer.study.numerics_report import Edge, Report


@dataclass(frozen=True, kw_only=True)
class Numerics(Options):
    """Say where an implementation's error comes from: definition, approximation, dtype inside, or place of rounding.

    For example: tensorformer study numerics transformers.activations:ACT2FN.gelu_new gelu
    """

    implementation: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMPLEMENTATION")]
    """reference, fast, native or triton (of act_and_mul), or module:function, such as torch.nn.functional:gelu."""

    gate: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GATE")]
    """What it is said to compute: a name that `tensorformer list gates` or `list activations` shows."""

    parameters: Overrides = ()
    """A parameter of the gate: --set limit=7 (may be repeated)."""

    layout: Literal["pair", "gate_up", "up_gate", "interleaved"] = "pair"
    """How it takes gate and up: as two tensors, or as one that holds both."""

    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
    """In which to run it, besides float64 for the definition."""

    def run(self) -> None:
        """Do it."""
        import torch
        from rich.table import Table

        from tensorformer.cli.show import console
        from tensorformer.errors import ConfigError
        from tensorformer.gates import activation
        from tensorformer.study.numerics import numerics

        if ":" in self.gate:
            name, _, given = self.gate.partition(":")
            raise ConfigError(f"{self.gate}: write the name alone, {name} --set {given.replace(',', ' --set ')}")
        declared = activation(self.gate, **dict(map(_parameter, self.parameters)))
        dtypes = [getattr(torch, name) for name in self.dtypes]
        layout = None if self.layout == "pair" else self.layout
        report = numerics(self.implementation, declared, layout=layout, dtypes=dtypes)
        held = f", {layout}" if layout else ""
        console.print(f"{report.implementation}, said to be {report.declared}{held}\n", soft_wrap=True)
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for question, answer in _rows(report):
            table.add_row(question, answer)
        console.print(table)
        console.print(f"\n{report.verdict}", soft_wrap=True)


def _parameter(text: str) -> tuple[str, float | None]:
    from tensorformer.errors import ConfigError

    name, equals, value = text.partition("=")
    try:
        return name.strip(), None if value.strip().lower() == "none" and equals else float(value)
    except ValueError:
        raise ConfigError(f"--set {text}: write name=number, such as --set limit=7") from None


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    definition = report.definition
    yield "definition", f"{definition.verdict} (in {definition.precision})"
    if report.approximation is None and not report.rounding:
        yield "the rest", "not judged: it fits no formula, or runs in none of these dtypes"
        return
    yield (
        "derivative",
        "none: autograd gets no gradient" if definition.derivative is None else definition.derivative.verdict,
    )
    if report.approximation is not None:
        yield "approximation", report.approximation.verdict
    for rounding in report.rounding:
        yield f"rounding, {rounding.dtype}", rounding.verdict
    for fusion in report.fusion:
        yield f"fusion, {fusion.dtype}", f"rounds {fusion.verdict}" if fusion.place else fusion.verdict
        shares = sorted(fusion.shares.items(), key=lambda s: -s[1])[:4]
        yield "", "; ".join(f"{share:.1%} {place}" for place, share in shares)
    if report.tails:
        yield "tails", _edges(report.tails, "kept, as far out as ±100")
        yield "at ±max, ±∞, NaN", _edges(report.limits, "the formula's limits")


def _edges(edges: tuple[Edge, ...], good: str) -> str:
    from tensorformer.study.numerics_edges import lost

    return lost(edges) or good
