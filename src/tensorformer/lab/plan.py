"""What a recipe comes to: every variant at its matched widths, with its exact size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tensorformer.config.count import active_parameters, causal_flops, parameters, training_flops
from tensorformer.config.load import description, variant_run
from tensorformer.config.match import Match, match, match_with_active
from tensorformer.config.schema import Compare, Model, Recipe, Run
from tensorformer.data.examples import Examples
from tensorformer.data.prepare import Corpus
from tensorformer.errors import ConfigError

BASE = "base"  # the folder of a recipe's own model, when it is trained without naming a variant


class Planned(NamedTuple):
    """A variant, ready to be trained at any seed."""

    name: str
    description: str
    run: Run  # at seed 0
    n_params: int
    n_active: int  # parameters that a token meets: fewer in mixtures of experts
    flops_per_token: int  # forward and backward
    remainder: float  # relative distance from the baseline in what is matched

    def at_seed(self, seed: int) -> Run:
        """Return the run at another seed."""
        return msgspec.structs.replace(self.run, seed=seed)


def plan(recipe: Recipe) -> list[Planned]:
    """Return the variants of a comparison, baseline first, widths solved for.

    Raises:
        ConfigError: the recipe compares nothing, or a variant can't be matched.
    """
    if recipe.compare is None:
        raise ConfigError("$.compare: the recipe has no [compare] table; use `tensorformer train` for a single run")
    compare, context = recipe.compare, recipe.train.context
    baseline = variant_run(recipe, compare.baseline, seed=0).model
    planned = []
    for name in (compare.baseline, *(v for v in recipe.variants if v != compare.baseline)):
        run = variant_run(recipe, name, seed=0)
        if name != compare.baseline and compare.match != "none":
            try:
                solved = _matched(run.model, baseline, compare, context)
            except ConfigError as e:
                raise ConfigError(f"$.variants.{name}: {e}") from None
            planned.append(_planned(recipe, name, msgspec.structs.replace(run, model=solved.model), solved.remainder))
        else:
            planned.append(_planned(recipe, name, run, parameters(run.model) / parameters(baseline) - 1))
    return planned


def _matched(model: Model, baseline: Model, compare: Compare, context: int) -> Match:
    if compare.match == "params_and_active":
        return match_with_active(model, baseline, compare.multiple_of, compare.tolerance)
    measures: dict[str, Callable[[Model], int]] = {
        "params": parameters,
        "active": active_parameters,
        "flops": lambda model: causal_flops(model, context),
    }
    measure = measures[compare.match]
    return match(model, measure(baseline), measure, compare.multiple_of, compare.tolerance)


def plan_one(recipe: Recipe, name: str | None) -> Planned:
    """Return one variant as the comparison would train it, or the recipe's own model for ``None``."""
    run = variant_run(recipe, name, seed=0)  # refuses a name that is not there
    if name is None or recipe.compare is None:
        return _planned(recipe, name or BASE, run, 0.0)
    return next(p for p in plan(recipe) if p.name == name)


def check_fits(examples: Examples, planned: list[Planned], contexts: tuple[int, ...]) -> None:
    """Refuse a model whose vocabulary is too small, or text that is too short, before a run is trained.

    Args:
        examples: the text; a probe always fits, by the recipe's own checks.
        planned: what is to be trained on it.
        contexts: multiples of the training context at which losses will be measured.
    """
    if not isinstance(examples, Corpus):
        return
    for p in planned:
        if examples.vocab_size > p.run.model.vocab_size:
            raise ConfigError(
                f"$.model.vocab_size: {p.run.model.vocab_size:,} (in {p.name}) is less than the tokenizer's; "
                f"write {examples.vocab_size}"
            )
    context = planned[0].run.train.context
    longest = max(contexts) * context
    for name, part, needed in (
        ("training", examples.train, context),
        ("validation", examples.validation, longest),
        ("tuning", examples.tuning, context),
    ):
        if len(part.tokens) <= needed:
            times = f"{max(contexts)} × train.context" if needed > context else "train.context"
            raise ConfigError(
                f"$.train.context: {times} = {needed:,} tokens do not fit into the {name} part of the data "
                f"({len(part.tokens):,} tokens); lower train.context or compare.contexts, or add text"
            )


def _planned(recipe: Recipe, name: str, run: Run, remainder: float) -> Planned:
    words = description(recipe, name) if name in recipe.variants else ""
    model, flops = run.model, training_flops(run.model, run.train.context)
    return Planned(name, words, run, parameters(model), active_parameters(model), flops, remainder)
