"""``tensorformer study precision``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class PrecisionOfActivations(Options):
    """Measure how exact each activation is in float32, bfloat16 and float16, in units in the last place."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """Scalar activations to measure; all where none is named."""

    write: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Write the whole page of activations in Markdown there instead."""

    def run(self) -> None:
        """Do it."""
        from rich.table import Table

        from tensorformer.cli.show import console
        from tensorformer.files import write_text
        from tensorformer.gates import SCALARS
        from tensorformer.gates.examples import example
        from tensorformer.study.precision import DTYPES, activations_page, precision

        if self.write is not None:
            write_text(self.write, activations_page())
            console.print(f"{self.write}", soft_wrap=True)
            return
        table = Table(box=None, pad_edge=False, header_style="bold", caption="value / derivative, largest error in ULP")
        table.add_column("activation")
        for dtype in DTYPES:
            table.add_column(dtype, justify="right")
        for name in self.names or SCALARS:
            scalar = example(SCALARS[name])
            found = [precision(scalar, dtype) for dtype in DTYPES.values()]
            table.add_row(str(scalar), *(f"{p.value:.2f} / {p.slope:.2f}" for p in found))
        console.print(table)
