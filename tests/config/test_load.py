"""Recipes: what is read, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tensorformer.config.load import (
    differences,
    load_config,
    run_from_toml,
    run_hash,
    to_toml,
    variant_run,
)
from tensorformer.config.schema import LinearAttention
from tensorformer.errors import ConfigError
from tests.recipes import RECIPES, TINY


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_of_the_project_loads_and_its_runs_survive_toml(path: Path) -> None:
    recipe = load_config(path)
    assert recipe.name == path.stem
    for name in recipe.variants:
        run = variant_run(recipe, name, seed=3)
        assert run_from_toml(to_toml(run)) == run


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size", "batchsize", r"unknown field `batchsize`.*\$\.train.*did you mean 'batch_size'"),
        ("d_model = 16", 'd_model = "16"', r"Expected `int`, got `str` - at `\$\.model\.d_model`"),
        ("tokens = 2560", "tokens = 0", r">= 1 - at `\$\.train\.tokens`"),
        (
            "n_heads = 2\n[model.mixers.b",
            "n_heads = 3\n[model.mixers.b",
            r"softmax\.n_heads: 3 does not divide.*\[1, 2,",
        ),
        ('gate = "swiglu"', 'gate = "swiglo"', r"\$\.model\.ffns\.swiglu\.gate: .*swiglu"),
        ('gate = "swiglu"', 'gate = "situ"', r"\$\.model\.ffns\.swiglu\.gate: .*beta"),
        ('mixer = "bilinear", ffn', 'mixer = "bilinaer", ffn', r"\$\.variants\.bilinear: .*did you mean 'bilinear'"),
        ('baseline = "swiglu"', 'baseline = "swigl"', r"\$\.compare\.baseline: .*did you mean 'swiglu'"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "names a seed twice"),
        ("seeds = [0, 1]", "seeds = []", r"length >= 1 - at `\$\.compare\.seeds`"),
        ("warmup_steps = 2", "warmup_steps = 20", "warmup_steps: 20 of 20 steps"),
        ("tokens = 2560", "tokens = 100", "less than one step"),
        ("batch_size = 8", "batch_size = 8\nmicro_batch_size = 3", "3 does not divide batch_size = 8"),
        ('name = "tiny"', 'name = "../tiny"', r"matching regex.*at `\$\.name`"),
        ("validation = 0.2", "validation = 0.9", "leaves nothing to train on"),
        (
            'preset = "bilinear"',
            'preset = "bilinear2"',
            r"Invalid enum value 'bilinear2' - at `\$\.model\.mixers.*'bilinear'",
        ),
        ('preset = "bilinear"', 'preset = "rwkv"', "known: bilinear, .*, gdn, gla, kda, .*, ssd"),
        (
            'preset = "bilinear"',
            'preset = "gdn"\nmax_beta = 1.5',
            r"max_beta: 1\.5 would let .* at most 1, or allow_neg_eig",
        ),
        (
            'preset = "bilinear"',
            'preset = "gdn"\nallow_neg_eigval = true\nmax_beta = 2.5',
            r"\$\.model\.mixers\.bilinear\.max_beta: 2\.5 would let the memory diverge; write at most 2",
        ),
        (
            'preset = "bilinear"',
            'preset = "gla"\nmax_beta = 0.5',
            "gla has no beta; .* one of bilinear_delta, gdn, kda",
        ),
        ('preset = "bilinear"', 'preset = "power"\noutput_norm = "rms"', "power divides by its row sum; leave it out"),
        ('preset = "bilinear"', 'preset = "ssd"\noutput_norm = "rms"', "ssd norms all heads after its gate; leave"),
        ('preset = "bilinear"', 'preset = "ssd"\noutput_gate = "none"', "ssd norms what its gate leaves; leave it out"),
        (
            'preset = "bilinear"',
            'preset = "bilinear"\noutput_norm = "row"',
            "Invalid enum value 'row'.*known: none, pos",
        ),
        ('preset = "bilinear"', 'preset = "gla"\nrope_theta = 5', "rope_theta: there are no rotary positions here"),
        ('preset = "bilinear"', 'preset = "gdn"\nn_key_heads = 3', "n_key_heads: 3 does not divide n_heads = 2"),
        ('preset = "bilinear"', 'preset = "bilinear"\nhead_dim = 5', "head_dim: 5 is odd; rotary positions"),
        (
            'kind = "adamw"',
            'kind = "adam"',
            r"'adam' - at `\$\.train\.optimizer\.kind`; did you mean 'adamw'",
        ),
        (
            'kind = "linear_attention"',
            'kind = "rnn"',
            r"'rnn'.*; known: linear_attention, softmax_attention",
        ),
        ("[variants.swiglu]", "[variants.swiglu]\ntrain.tokens = 5", "must be the same for all variants"),
        ("[variants.swiglu]", "[variants.swiglu]\ndata.validation = 0.1", "may override `model` and `train` only"),
        ("[train]", "[train", "not TOML"),
        ("lr = 1e-2", "lr = nan", r"finite number, got `nan` - at `\$\.train\.optimizer\.lr`"),
        ("delta = 0.05", "delta = inf", r"finite number, got `inf` - at `\$\.compare\.delta`"),
        ("seeds = [0, 1]", "seeds = [0, 1]\nlearning_rates = [1e-3, inf]", r"finite number, got `inf`"),
        ("n_layers = 2", "n_layers = 3_000_000", r"<= 10000 - at `\$\.model\.n_layers`"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TINY
    with pytest.raises(ConfigError, match=message) as e:
        load_config(write(tmp_path, TINY.replace(old, new, 1)))
    assert "\n" not in str(e.value).replace("not TOML", "")
    assert "r.toml" in str(e.value)


def test_a_missing_recipe_suggests_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, TINY)
    with pytest.raises(ConfigError, match=r"no such recipe; did you mean .*r\.toml"):
        load_config(tmp_path / "rr.toml")


def test_overrides_from_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, TINY)
    recipe = load_config(path, ["train.tokens=1280", "model.norm=layer_norm", "compare.seeds=[5]"])
    assert recipe.train.tokens == 1280
    assert recipe.model.norm == "layer_norm"
    assert recipe.compare is not None
    assert recipe.compare.seeds == (5,)
    for bad in ("train.tokens", "=3", "train.tokens=[", "train.tokenz=3"):
        with pytest.raises(ConfigError):
            load_config(path, [bad])


def test_tokens_are_whole_steps(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, TINY), ["train.tokens=2700"]).train.tokens == 21 * 128


def test_an_override_of_another_kind_replaces_the_table(tmp_path: Path) -> None:
    text = (
        TINY
        + '[variants.other]\nmodel.mixers.softmax = { kind = "linear_attention", preset = "linear", n_heads = 4 }\n'
    )
    run = variant_run(load_config(write(tmp_path, text)), "other", 0)
    assert run.model.mixers["softmax"] == LinearAttention(preset="linear", n_heads=4)


def test_the_hash_sees_every_value_and_no_order(tmp_path: Path) -> None:
    recipe = load_config(write(tmp_path, TINY))
    run = variant_run(recipe, "bilinear", 0)
    assert run_hash(run) == run_hash(run_from_toml(to_toml(run)))
    more = write(tmp_path, TINY + '[model.ffns.unused]\nkind = "feed_forward"\ngate = "relu"\nd_ff = 7\n')
    assert run_hash(variant_run(load_config(more), "bilinear", 0)) == run_hash(run)  # no layer uses it
    other = msgspec.structs.replace(run, seed=1)
    assert run_hash(other) != run_hash(run)
    assert differences(run, other) == ["seed: 0 → 1"]
    reordered = msgspec.structs.replace(run.model, mixers=dict(reversed(run.model.mixers.items())))
    assert run_hash(msgspec.structs.replace(run, model=reordered)) == run_hash(run)
