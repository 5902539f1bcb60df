"""``tensorformer compare``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from tensorformer.cli.options import RecipePath, RunOptions


@dataclass(frozen=True, kw_only=True)
class Compare(RunOptions):
    """Train the variants of a recipe side by side, at equal size and on equal tokens, and write the report.

    Finished runs are not trained again: after Ctrl-C, a crash, or a new variant or seed in the recipe, the same
    command does only what is missing.
    """

    recipe: RecipePath
    """A TOML file, such as recipes/demo.toml."""

    jobs: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: one a core, or one on a GPU)")
    ] = None
    """Runs trained side by side, a process and a thread each."""

    dry_run: bool = False
    """Only say what would be trained: widths, parameters, tokens, and the time it would take here."""

    def run(self) -> None:
        """Do it."""
        from tensorformer.cli.options import in_recipe
        from tensorformer.cli.progress import Live
        from tensorformer.cli.show import show_plan, show_results
        from tensorformer.config.load import load_config
        from tensorformer.errors import ConfigError
        from tensorformer.lab.compare import compare
        from tensorformer.lab.device import default_jobs
        from tensorformer.lab.plan import plan

        recipe = load_config(self.recipe, self.overrides)
        with in_recipe(self.recipe):
            planned = plan(recipe)
        jobs = default_jobs(self.device) if self.jobs is None else self.jobs
        if jobs < 1:
            raise ConfigError(f"--jobs {jobs}: write 1 or more")
        if self.dry_run:
            show_plan(recipe, planned, self.runs, self.device, jobs)
            return
        with Live() as live:
            comparison = compare(recipe, planned, self.runs, self.device, jobs, live.watcher, str(self.recipe))
        from tensorformer.report import write_report

        page = write_report(comparison, self.runs / recipe.name)
        show_results(comparison, page)
