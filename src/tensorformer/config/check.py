"""What the types of a recipe can't say: names that must exist, sizes that must divide."""

from __future__ import annotations

from tensorformer.config.activations import feed_forward_activation
from tensorformer.config.check_moe import check_moe
from tensorformer.config.presets import PRESETS
from tensorformer.config.schema import (
    Data,
    Induction,
    LinearAttention,
    Model,
    MoE,
    Needle,
    Recall,
    Recipe,
    Run,
    SelectiveCopying,
    SoftmaxAttention,
    Train,
)
from tensorformer.errors import ConfigError, GateError, suggest


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
    _check_probe(run)


def _check_model(model: Model) -> None:
    for name, mixer in model.mixers.items():
        _check_mixer(mixer, model.d_model, f"$.model.mixers.{name}")
    for name, ffn in model.ffns.items():
        if "." in name:
            told = f"{name.replace('.', '-')!r}: a dot parts the two widths of a mixture of experts from its name"
            raise ConfigError(f"$.model.ffns: {name!r} has a dot in its name; write {told}")
        if isinstance(ffn, MoE):
            check_moe(ffn, f"$.model.ffns.{name}")
            continue
        try:
            feed_forward_activation(ffn)
        except (GateError, TypeError) as e:
            raise ConfigError(f"$.model.ffns.{name}.gate: {e}") from None
    for i, layer in enumerate(model.layers):
        for kind, named, known in (("mixer", layer.mixer, model.mixers), ("ffn", layer.ffn, model.ffns)):
            if named not in known:
                raise ConfigError(f"$.model.layers[{i}].{kind}: there is no {named!r}{suggest(named, known)}")


def _check_mixer(mixer: SoftmaxAttention | LinearAttention, d_model: int, where: str) -> None:
    if isinstance(mixer, LinearAttention):
        value_dim, rotary = mixer.value_dim, PRESETS[mixer.preset].rotary
        shared, key = mixer.n_key_heads, "n_key_heads"
        _check_linear(mixer, where)
    else:
        value_dim, rotary = mixer.head_dim, mixer.position == "rope"
        shared, key = mixer.n_kv_heads, "n_kv_heads"
    n_heads = mixer.n_heads
    if (mixer.head_dim is None or value_dim is None) and d_model % n_heads:
        fitting = [h for h in range(1, d_model + 1) if d_model % h == 0 and h <= 2 * n_heads]
        missing = [key for key in ("head_dim", "value_dim") if getattr(mixer, key, 0) is None]
        raise ConfigError(
            f"{where}.n_heads: {n_heads} does not divide d_model = {d_model}; write one of {fitting}, "
            f"or give {' and '.join(missing)}"
        )
    head_dim = mixer.head_dim or d_model // n_heads
    if rotary and head_dim % 2:
        raise ConfigError(f"{where}.head_dim: {head_dim} is odd; rotary positions turn pairs of features")
    if not rotary and mixer.rope_theta is not None:
        raise ConfigError(f"{where}.rope_theta: there are no rotary positions here to have one; leave it out")
    if shared and n_heads % shared:
        raise ConfigError(f"{where}.{key}: {shared} does not divide n_heads = {n_heads}")


def _check_linear(mixer: LinearAttention, where: str) -> None:
    preset = PRESETS[mixer.preset]
    if mixer.output_norm and preset.output_norm in ("row", "gated_rms"):
        own = "divides by its row sum" if preset.output_norm == "row" else "norms all heads after its gate"
        raise ConfigError(f"{where}.output_norm: {mixer.preset} {own}; leave it out")
    if mixer.output_gate == "none" and preset.output_norm == "gated_rms":
        raise ConfigError(f"{where}.output_gate: {mixer.preset} norms what its gate leaves; leave it out")
    if preset.written != "beta":
        for key, given in (("max_beta", mixer.max_beta is not None), ("allow_neg_eigval", mixer.allow_neg_eigval)):
            if given:
                delta = ", ".join(name for name, p in PRESETS.items() if p.written == "beta")
                raise ConfigError(f"{where}.{key}: {mixer.preset} has no beta; leave it out, or take one of {delta}")
    largest = 2 if mixer.allow_neg_eigval else 1
    if mixer.max_beta is not None and mixer.max_beta > largest:
        further = "" if mixer.allow_neg_eigval else ", or allow_neg_eigval = true for up to 2"
        raise ConfigError(
            f"{where}.max_beta: {mixer.max_beta:g} would let the memory diverge; write at most {largest}{further}"
        )


def _check_probe(run: Run) -> None:
    probe, context, where = run.data.probe, run.train.context, "$.data.probe"
    if probe is None:
        return
    plain = Data(probe=probe)
    for key in ("source", "text_field", "tokenizer", "validation", "tuning"):
        if getattr(run.data, key) != getattr(plain, key):
            raise ConfigError(f"$.data.{key}: a probe is generated and reads no text; leave one of the two out")
    match probe:
        case Recall(pairs=pairs, keys=keys):
            if pairs > keys:
                raise ConfigError(f"{where}.keys: {keys} can't be different in {pairs} pairs; write {pairs} or more")
            if 3 * pairs > context:
                raise ConfigError(_too_long(f"{where}.pairs: {pairs} pairs and as many queries", 3 * pairs, context))
        case Induction(shortest=shortest, longest=longest, symbols=symbols):
            if shortest > longest:
                raise ConfigError(f"{where}.shortest: {shortest} is above longest = {longest}; write {longest} or less")
            if longest > symbols:
                raise ConfigError(
                    f"{where}.symbols: {symbols} can't be different in a passage of {longest}; write {longest} or more"
                )
            if longest >= context:
                told = f"{where}.longest: a passage of {longest} and one token of its return"
                raise ConfigError(_too_long(told, longest + 1, context))
        case SelectiveCopying(copied=copied):
            if 2 * copied > context:
                raise ConfigError(_too_long(f"{where}.copied: {copied} symbols and as many marks", 2 * copied, context))
        case Needle(depths=(low, high)):
            if low > high:
                raise ConfigError(f"{where}.depths: {low:g} is above {high:g}; write [{high:g}, {low:g}]")
            if context < 3:
                raise ConfigError(_too_long(f"{where}: a key, its value and the key again", 3, context))
    if run.model.vocab_size < probe.vocab_size:
        raise ConfigError(
            f"$.model.vocab_size: {run.model.vocab_size:,} is less than the probe's; write {probe.vocab_size}"
        )


def _too_long(what: str, needed: int, context: int) -> str:
    return f"{what} take {needed:,} tokens of a context of {context:,}; write less, or raise train.context"


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
