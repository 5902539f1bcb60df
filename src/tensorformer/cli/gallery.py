"""``tensorformer gallery``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tensorformer.cli.options import Options


@dataclass(frozen=True, kw_only=True)
class Gallery(Options):
    """Write one page, to be opened in any browser, that shows every activation: curves, maps, formulas, comparison."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("gallery.html")
    """The page; one that is there is replaced."""

    png: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: no pictures)")] = None
    """Also write contact sheets there: scalars.png, gates.png, and gallery.png with both."""

    def run(self) -> None:
        """Do it."""
        from tensorformer.cli.show import console
        from tensorformer.report.gallery import write_gallery
        from tensorformer.report.gallery_png import write_sheets

        written = [write_gallery(self.out), *(write_sheets(self.png) if self.png is not None else [])]
        for path in written:
            console.print(str(path), soft_wrap=True)
