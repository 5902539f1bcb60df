"""``tensorformer train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from tensorformer.cli.options import RecipePath, RunOptions


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Train one model of a recipe, in this process and with all cores.

    A comparison without a grid of learning rates uses the same folder, and takes the run over. After Ctrl-C or a
    crash, the same command goes on.
    """

    recipe: RecipePath
    """A TOML file, such as recipes/demo.toml."""

    variant: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the recipe's own [model])")
    ] = None
    """Which variant, at the widths a comparison would give it."""

    seed: int = 0
    """Of the first weights and of the order of the text."""

    def run(self) -> None:
        """Do it."""
        from tensorformer.cli.options import in_recipe
        from tensorformer.cli.progress import Live
        from tensorformer.cli.show import console
        from tensorformer.config.load import load_config
        from tensorformer.data.examples import open_examples
        from tensorformer.errors import ConfigError
        from tensorformer.lab.device import pick
        from tensorformer.lab.interrupt import interrupts_noted
        from tensorformer.lab.plan import check_fits, plan_one
        from tensorformer.lab.pool import Event, Task
        from tensorformer.lab.train import Interrupted, train

        recipe = load_config(self.recipe, self.overrides)
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: write 0 or more")
        with in_recipe(self.recipe):
            planned = plan_one(recipe, self.variant)
        contexts = recipe.compare.contexts if recipe.compare else (1,)
        examples = open_examples(recipe.data)
        check_fits(examples, [planned], contexts)
        folder = self.runs / recipe.name / planned.name / f"seed-{self.seed}"
        label = f"{planned.name}/seed-{self.seed}"
        with Live() as live, interrupts_noted() as interrupted:
            live.watcher.on_tasks([Task(label, planned.run, folder)])
            try:
                result = train(
                    planned.at_seed(self.seed),
                    folder,
                    examples,
                    pick(self.device),
                    contexts=contexts,
                    on_progress=lambda p: live.watcher.on_event(Event(label, "progress", p)),
                    should_stop=interrupted,
                )
            except Interrupted:
                raise KeyboardInterrupt from None
        trained = f"{result.seconds:.0f} s of training"
        if result.bits_per_byte is None:
            right = result.context_accuracies[planned.run.train.context]
            found = f"loss {result.loss:.4f} nats an answer, {right:.1%} of the answers right"
            console.print(f"{label}: {planned.n_params:,} parameters, {found}, {trained}")
            return
        found = f"loss {result.loss:.4f} nats a token, {result.bits_per_byte:.4f} bits a byte"
        console.print(f"{label}: {planned.n_params:,} parameters, {found}, {trained}")
        console.print(f"Sample from it: tensorformer generate {folder}", soft_wrap=True)
