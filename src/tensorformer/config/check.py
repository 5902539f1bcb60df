"""What the types of a recipe can't say: names that must exist, sizes that must divide."""

from __future__ import annotations

from tensorformer.config.row_activations import ROW_ACTIVATIONS, RowActivation
from tensorformer.config.schema import (
    Data,
    FeedForward,
    Learned,
    LinearAttention,
    Model,
    Recipe,
    Run,
    SoftmaxAttention,
    Train,
)
from tensorformer.errors import ConfigError, GateError, suggest
from tensorformer.gates import GATES, SCALARS, Gate, Scalar, activation

Activation = Scalar | Gate | RowActivation


def feed_forward_activation(ffn: FeedForward) -> Activation:
    """Return the activation that a feed-forward table names, its parameters bound; ``"none"`` unbinds a cap.

    A learned parameter is bound to its first value: ``learned_parameters`` says which those are.
    """
    table = {"name": ffn.gate} if isinstance(ffn.gate, str) else ffn.gate
    name = table.get("name")
    if not isinstance(name, str):
        raise GateError('a gate table needs its name: { name = "situ", beta = 4.0, linear_beta = 25.0 }')
    parameters: dict[str, float | None] = {}
    for key, value in table.items():
        if isinstance(value, str) and key != "name" and value != "none":
            raise GateError(f'{key} = "{value}": write a number, or "none" where the formula has a form without it')
        if key != "name":
            first = value.learned if isinstance(value, Learned) else value
            parameters[key] = None if isinstance(first, str) else first
    if name in ROW_ACTIVATIONS:
        if learned_parameters(ffn):
            raise GateError(f"{name!r} has its own trained weights and no parameter to learn besides")
        return ROW_ACTIVATIONS[name].bind(**parameters)
    if name in GATES or name in SCALARS:
        return activation(name, **parameters)
    raise GateError(f"unknown activation {name!r}{suggest(name, [*GATES, *SCALARS, *ROW_ACTIVATIONS])}")


def learned_parameters(ffn: FeedForward) -> dict[str, float]:
    """Return the activation's parameters that are trained, with their first values."""
    table = {} if isinstance(ffn.gate, str) else ffn.gate
    return {name: value.learned for name, value in table.items() if isinstance(value, Learned)}


def is_gated(activation: Activation) -> bool:
    """Say whether a feed-forward layer around it has three matrices rather than two."""
    return activation.gated if isinstance(activation, RowActivation) else isinstance(activation, Gate)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe whose parts do not fit together."""
    check_run(Run(data=recipe.data, model=recipe.model, train=recipe.train, seed=0))
    if recipe.compare is None:
        return
    compare = recipe.compare
    if not recipe.variants:
        raise ConfigError("$.variants: a comparison needs variants; add [variants.NAME] tables")
    if compare.baseline not in recipe.variants:
        raise ConfigError(
            f"$.compare.baseline: there is no variant {compare.baseline!r}{suggest(compare.baseline, recipe.variants)}"
        )
    if len(set(compare.seeds)) < len(compare.seeds):
        raise ConfigError(f"$.compare.seeds: {list(compare.seeds)} names a seed twice")
    if 1 not in compare.contexts:
        raise ConfigError("$.compare.contexts: 1, the training context itself, must be among the multiples")


def check_run(run: Run) -> None:
    """Refuse a run that can't be built."""
    _check_model(run.model)
    check_train(run.train)
    check_shares(run.data)


def _check_model(model: Model) -> None:
    for name, mixer in model.mixers.items():
        _check_mixer(mixer, model.d_model, f"$.model.mixers.{name}")
    for name, ffn in model.ffns.items():
        try:
            feed_forward_activation(ffn)
        except (GateError, TypeError) as e:
            raise ConfigError(f"$.model.ffns.{name}.gate: {e}") from None
    for i, layer in enumerate(model.layers):
        for kind, named, known in (("mixer", layer.mixer, model.mixers), ("ffn", layer.ffn, model.ffns)):
            if named not in known:
                raise ConfigError(f"$.model.layers[{i}].{kind}: there is no {named!r}{suggest(named, known)}")


def _check_mixer(mixer: SoftmaxAttention | LinearAttention, d_model: int, where: str) -> None:
    heads = mixer.n_heads
    value_dim = mixer.value_dim if isinstance(mixer, LinearAttention) else mixer.head_dim
    if (mixer.head_dim is None or value_dim is None) and d_model % heads:
        fitting = [h for h in range(1, d_model + 1) if d_model % h == 0 and h <= 2 * heads]
        raise ConfigError(
            f"{where}.n_heads: {heads} does not divide d_model = {d_model}; write one of {fitting}, or give head_dim"
        )
    head_dim = mixer.head_dim or d_model // heads
    if head_dim % 2:
        raise ConfigError(f"{where}.head_dim: {head_dim} is odd; rotary positions turn pairs of features")
    if isinstance(mixer, SoftmaxAttention) and mixer.n_kv_heads and heads % mixer.n_kv_heads:
        raise ConfigError(f"{where}.n_kv_heads: {mixer.n_kv_heads} does not divide n_heads = {heads}")


def check_shares(data: Data) -> None:
    """Refuse a split that leaves nothing to train on."""
    if data.validation + data.tuning >= 1:
        total = f"data.validation + data.tuning = {data.validation} + {data.tuning}"
        raise ConfigError(f"{total} leaves nothing to train on; keep their sum below 1")


def check_train(train: Train) -> None:
    """Refuse a run that takes no step, or that ends before its warm-up does."""
    per_step = train.batch_size * train.context
    if train.tokens < per_step:
        raise ConfigError(
            f"$.train.tokens: {train.tokens:,} is less than one step (batch_size × context = {per_step:,} tokens)"
        )
    if train.micro_batch_size and train.batch_size % train.micro_batch_size:
        raise ConfigError(
            f"$.train.micro_batch_size: {train.micro_batch_size} does not divide batch_size = {train.batch_size}"
        )
    steps = train.tokens // per_step
    if train.schedule.warmup_steps >= steps:
        raise ConfigError(
            f"$.train.schedule.warmup_steps: {train.schedule.warmup_steps} of {steps} steps; "
            f"lower it or raise train.tokens"
        )
