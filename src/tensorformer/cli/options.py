"""Options that several commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

RecipePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
Overrides = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="KEY=VALUE")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command takes."""

    debug: bool = False
    """Show the traceback of an error instead of one line."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What every command that trains takes."""

    runs: Path = Path("runs")
    """Folder of all runs; a recipe named `demo` lives in `runs/demo`."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, …"""

    overrides: Overrides = ()
    """Change a value of the recipe: --set train.tokens=1000000 (may be repeated)."""


@contextlib.contextmanager
def in_recipe(path: Path) -> Iterator[None]:
    """Name the recipe in front of what is wrong with it."""
    from tensorformer.errors import ConfigError

    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
