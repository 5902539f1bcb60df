"""``tensorformer report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class Report(Options):
    """Draw the page, the figures and the Markdown of a finished comparison anew from its results.json."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Where the comparison lives, such as runs/demo."""

    def run(self) -> None:
        """Do it."""
        from tensorformer.cli.show import show_results
        from tensorformer.lab.compare import read_results
        from tensorformer.report import write_report

        comparison = read_results(self.folder)
        show_results(comparison, write_report(comparison, self.folder))
