"""From TOML to a checked recipe, from a recipe to the run of one variant, and back to canonical text."""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from tensorformer.config.check import check_recipe, check_run
from tensorformer.config.schema import Recipe, Run, Section
from tensorformer.config.shapes import blocks
from tensorformer.errors import ConfigError, suggest

T = TypeVar("T", bound=Section)

# What must be equal for a comparison to be one: overriding these in a variant would compare two things at once.
SHARED_BY_ALL = ("tokens", "context", "batch_size", "evaluate_tokens", "final_tokens")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and refuse, with the path of the culprit, whatever is misspelt, mistyped or impossible.

    Args:
        path: a TOML file.
        overrides: ``"train.tokens=1000000"``, dotted key and TOML value, applied over the file.

    Returns:
        The recipe; ``.model`` is the base model that variants override.

    Raises:
        ConfigError: one line that names the file, the key and the mend.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [str(p) for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such recipe{suggest(str(path), near)}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: can't be read as text: {e}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not TOML: {e}") from None
    for override in overrides:
        tree = merge(tree, _parse_override(override))
    try:
        recipe = _whole_steps(_decode(tree, Recipe))
        check_recipe(recipe)
        for name in recipe.variants or {}:
            variant_run(recipe, name, seed=0)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    return recipe


def variant_run(recipe: Recipe, name: str | None, seed: int) -> Run:
    """Return the run of one variant at one seed, before its widths are matched; ``None`` names the base itself."""
    base = Run(data=recipe.data, model=recipe.model, train=recipe.train, seed=seed)
    if name is None:
        check_run(base)
        return _used_only(base)
    if name not in recipe.variants:
        raise ConfigError(f"there is no variant {name!r}{suggest(name, recipe.variants)}")
    overrides = {k: v for k, v in recipe.variants[name].items() if k != "description"}
    where = f"$.variants.{name}"
    for key in overrides:
        if key not in ("model", "train"):
            raise ConfigError(f"{where}.{key}: a variant may override `model` and `train` only")
    train = overrides.get("train")
    for key in SHARED_BY_ALL:
        if isinstance(train, Mapping) and key in train:
            raise ConfigError(f"{where}.train.{key}: must be the same for all variants; set it in [train]")
    try:
        run = _decode(merge(msgspec.to_builtins(base), overrides), Run)
        check_run(run)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
    return _used_only(run)


def description(recipe: Recipe, name: str) -> str:
    """Return the variant's own words about itself, or nothing."""
    return str(recipe.variants[name].get("description", ""))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one tree over another: tables are merged, everything else, and a table of another kind, is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def to_toml(section: Section) -> str:
    """Return the section as TOML, defaults included, so that the text stays true when defaults move."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(section)))


def run_from_toml(text: str) -> Run:
    """Read back what ``to_toml`` wrote for a run."""
    try:
        return _decode(tomllib.loads(text), Run)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"not TOML: {e}") from None


def run_hash(run: Run) -> str:
    """Return the run's id: 16 hex digits of the SHA-256 of its canonical form."""
    return hashlib.sha256(msgspec.json.encode(run, order="sorted")).hexdigest()[:16]


def differences(old: Run, new: Run) -> list[str]:
    """Return the keys in which two runs differ, as ``path: old → new``."""
    a, b = dict(_leaves(msgspec.to_builtins(old))), dict(_leaves(msgspec.to_builtins(new)))
    return [f"{k}: {a.get(k, 'absent')} → {b.get(k, 'absent')}" for k in {**a, **b} if a.get(k) != b.get(k)]


def _whole_steps(recipe: Recipe) -> Recipe:
    """Round the tokens down to whole steps, so that what a recipe says and what is trained are one number."""
    per_step = recipe.train.batch_size * recipe.train.context
    tokens = recipe.train.tokens // per_step * per_step or recipe.train.tokens  # less than a step is refused later
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, tokens=tokens))


def _used_only(run: Run) -> Run:
    """Leave out the parts that no layer uses: naming a new one in the recipe must not make this another run."""
    used = blocks(run.model)
    mixers = {name: run.model.mixers[name] for name, _ in used}
    ffns = {name: run.model.ffns[name] for _, name in used}
    return msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, mixers=mixers, ffns=ffns))


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.-]+", key.strip()):
        raise ConfigError(f"override {text!r}: write key=value, for example train.tokens=1000000")
    for candidate in (value, f'"{value}"'):  # a bare word is a string
        try:
            return tomllib.loads(f"{key.strip()} = {candidate}")
        except tomllib.TOMLDecodeError:
            continue
    raise ConfigError(f"override {text!r}: {value!r} is not a TOML value")


def _decode(tree: Mapping[str, Any], kind: type[T]) -> T:
    for key, value in _leaves(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"Expected a finite number, got `{value}` - at `$.{key}`")
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as e:
        message = str(e)
        unknown = re.search(r"unknown field `([^`]+)`", message)
        if unknown and re.search("capacity|token_drop|drop_token", unknown[1]):
            message += "; there is no capacity here: no token is dropped, whatever the load; leave it out"
        elif unknown:
            at = re.search(r"at `.*?(\w+)(?:\[\.\.\.\])?`$", message)
            message += suggest(unknown[1], _keys(at[1] if at else None))
        value = re.search(r"Invalid enum value '([^']*)' - at `.*?(\w+)`$", message)
        if value:
            message += suggest(value[1], _words(value[2]))
        table = re.search(r"Invalid value '([^']*)' - at `.*?(\w+)(?:\[\.\.\.\])?\.kind`$", message)
        if table:
            message += suggest(table[1], _kinds(table[2]))
        raise ConfigError(message) from None


def _keys(field: str | None) -> set[str]:
    """Return the keys of the tables that fields of this name may hold; None: of all tables."""
    tables = _sections(Section) if field is None else _tables(field)
    return {key for table in tables for key in table.__struct_fields__}


def _kinds(field: str) -> list[str]:
    """Return the kinds of table that fields of this name may hold."""
    return [str(table.__struct_config__.tag) for table in _tables(field)]


def _tables(field: str) -> Iterator[type[Section]]:
    """Yield the tables that fields of this name may hold."""
    yield from (hint for hint in _hints(field) if isinstance(hint, type) and issubclass(hint, Section))


def _words(field: str) -> list[str]:
    """Return the words that fields of this name may be set to."""
    return list(dict.fromkeys(word for h in _hints(field) if get_origin(h) is Literal for word in get_args(h)))


def _hints(field: str) -> Iterator[Any]:
    """Yield the types of all fields of this name, and what they are made of."""

    def within(hint: Any) -> Iterator[Any]:
        yield hint
        for part in get_args(hint):
            yield from within(part)

    for section in _sections(Section):
        if field in section.__struct_fields__:
            yield from within(get_type_hints(section)[field])


def _sections(base: type[Section]) -> Iterator[type[Section]]:
    for child in base.__subclasses__():
        yield child
        yield from _sections(child)


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _without_none(v) for k, v in tree.items() if v is not None}
    if isinstance(tree, list | tuple):
        return [_without_none(v) for v in tree]
    return tree


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for k, v in tree.items():
            yield from _leaves(v, f"{path}.{k}" if path else k)
    elif isinstance(tree, list | tuple) and any(isinstance(v, float | Mapping) for v in tree):
        for i, v in enumerate(tree):
            yield from _leaves(v, f"{path}[{i}]")
    else:
        yield path, tree
