"""``tensorformer list``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class List(Options):
    """Show what there is to name in a recipe, or which runs there are."""

    what: Annotated[
        Literal["gates", "activations", "attention", "runs"], tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")
    ] = "gates"
    """gates (three-matrix feed-forward), activations (two-matrix), attention (presets), or runs."""

    runs: Path = Path("runs")
    """Folder of all runs."""

    def run(self) -> None:
        """Do it."""
        from rich.table import Table

        from tensorformer.cli.show import console

        table = Table(box=None, pad_edge=False, header_style="bold")
        rows = {"gates": _gates, "activations": _activations, "attention": _attention, "runs": self._runs}[self.what]()
        for i, header in enumerate(rows[0]):
            table.add_column(header, no_wrap=i == 0)  # a name is to be copied
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)

    def _runs(self) -> list[tuple[str, ...]]:
        from tensorformer.errors import CheckpointError, TensorformerError
        from tensorformer.lab import checkpoint, record
        from tensorformer.lab.optim import n_steps

        rows: list[tuple[str, ...]] = [("run", "steps", "loss")]
        # os.walk passes over folders that vanish meanwhile, as those of a checkpoint being written do.
        for folder in sorted(Path(root) for root, _, files in os.walk(self.runs) if record.IDENTITY in files):
            try:
                steps = n_steps(record.read_run(folder).train)
                last, result = checkpoint.latest(folder), record.read_result(folder)
            except TensorformerError:
                rows.append((str(folder), "unreadable", ""))
                continue
            done = "0" if last is None else last.name.removeprefix("checkpoint-")
            rows.append((str(folder), f"{done} of {steps}", f"{result.loss:.4f}" if result else "not finished"))
        if len(rows) == 1:
            raise CheckpointError(f"{self.runs}: no runs there; `tensorformer train` or `compare` makes some")
        return rows


def _gates() -> list[tuple[str, ...]]:
    from tensorformer.config.row_activations import ROW_ACTIVATIONS
    from tensorformer.gates import GATES

    rows = [("gate", "formula h(g, u)", "degree", "source")]
    rows += [(name, str(gate.expr), _degree(gate.degree), gate.source) for name, gate in GATES.items()]
    return rows + [(name, a.formula, "–", a.source) for name, a in ROW_ACTIVATIONS.items() if a.gated]


def _activations() -> list[tuple[str, ...]]:
    from tensorformer.config.row_activations import ROW_ACTIVATIONS
    from tensorformer.gates import SCALARS

    rows = [("activation", "formula", "degree", "source")]
    rows += [(name, str(scalar.expr), _degree(scalar.degree), scalar.source) for name, scalar in SCALARS.items()]
    return rows + [(name, a.formula, "–", a.source) for name, a in ROW_ACTIVATIONS.items() if not a.gated]


def _degree(degree: int | None) -> str:
    return "–" if degree is None else str(degree)


def _attention() -> list[tuple[str, ...]]:
    from tensorformer.config.presets import PRESETS

    rows = [("preset", "degree", "decay", "update", "norm, gate", "state a head", "per token and head", "source")]
    for name, p in PRESETS.items():
        after = ", ".join(part for part in (p.output_norm, p.output_gate) if part != "none") or "–"
        rows.append((name, str(p.degree), p.decay, p.update, after, p.state, p.cost, p.source))
    softmax = ("softmax", "–", "none", "–", "–", "2·T·K", "4·T·K", "Vaswani et al. 2017, arXiv 1706.03762")
    return [*rows, softmax]
