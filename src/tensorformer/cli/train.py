"""``tensorformer train``."""

from __future__ import annotations

from dataclasses import dataclass

from tensorformer.cli.options import RecipePath, RunOptions


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Train one model of a recipe, in this process and with all cores.

    Its folder is the one that `compare` would use, so a comparison takes it over.
    """

    recipe: RecipePath
    """A TOML file, such as recipes/demo.toml."""

    variant: str | None = None
    """Which variant, at the widths a comparison would give it. Default: the recipe's own [model]."""

    seed: int = 0
    """Of the first weights and of the order of the text."""

    def run(self) -> None:
        """Do it."""
        from tensorformer.cli.progress import Live, console
        from tensorformer.config.load import load_config
        from tensorformer.data.prepare import prepare
        from tensorformer.errors import ConfigError
        from tensorformer.lab.compare import check_fits
        from tensorformer.lab.device import pick
        from tensorformer.lab.plan import plan_one
        from tensorformer.lab.pool import Event, Task
        from tensorformer.lab.train import train

        recipe = load_config(self.recipe, self.overrides)
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: write 0 or more")
        planned = plan_one(recipe, self.variant)
        corpus = prepare(recipe.data)
        check_fits(corpus, planned.run)
        folder = self.runs / recipe.name / planned.name / f"seed-{self.seed}"
        label = f"{planned.name}/seed-{self.seed}"
        with Live() as live:
            live.watcher.on_tasks([Task(label, planned.run, folder)])
            result = train(
                planned.at_seed(self.seed),
                folder,
                corpus,
                pick(self.device),
                on_progress=lambda p: live.watcher.on_event(Event(label, "progress", p)),
            )
        console.print(
            f"{label}: {planned.n_params:,} parameters, loss {result.loss:.4f} nats a token, "
            f"{result.bits_per_byte:.4f} bits a byte, {result.seconds:.0f} s of training"
        )
        console.print(f"Sample from it: tensorformer generate {folder}", soft_wrap=True)
