"""The parameters of activations: what they may be called, and which values they may have."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from tensorformer.errors import GateError, suggest

Parameter = float | Tensor | None
# What a formula or the code printed from one means by these names.
_TAKEN = frozenset(
    (
        *("x", "g", "u", "h", "dh", "dg", "du", "value", "gate", "lambda", "torch", "aten", "tl", "triton"),
        *("top", "floor", "zero", "mask", "row", "column", "inside", "program", "blocks", "row_count", "column_count"),
        *("HEIGHT", "WIDTH", "exp", "log", "sqrt", "pi", "oo", "sigmoid", "tanh", "Phi", "relu", "cap", "clip"),
        *("select", "expm1", "softplus", "positive"),
    )
)
_NUMBERED = re.compile(r"[twfd]\d+|[xgu]_\d*|[fd]_[gu]|\w+_(pointer|row|column)")
OPTIONAL = (">= 0", "> 0 or None")
_LEAST, _MOST = 1e-30, 1e30  # a product of two is still a number of float32
Rule = Literal["> 0", ">= 0", "> 0 or None", "any number"]


def fits(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Say whether a tensor of ``shape`` broadcasts to the shape ``into``."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(shape[::-1], into[::-1], strict=False))


def is_zero(value: Parameter) -> bool:
    """Say whether a parameter is the number zero; of a tensor nothing is known."""
    return not isinstance(value, Tensor) and value == 0


def check_names(owner: str, names: Iterable[str]) -> None:
    """Refuse a parameter's name that is no identifier, or that printed formulas use for something else."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name in _TAKEN or _NUMBERED.fullmatch(name):
            raise GateError(
                f"{owner!r}: a parameter can't be called {name!r}; write another name, such as {name}_value"
            )


def described(name: str, parameters: Mapping[str, Parameter]) -> str:
    """Return ``name(parameter=value, …)``; a tensor is given by its shape."""
    given = ", ".join(
        f"{n}={f'tensor{tuple(v.shape)}' if isinstance(v, Tensor) else repr(v)}" for n, v in parameters.items()
    )
    return f"{name}({given})" if given else name


def checked(name: str, needs: Mapping[str, Rule], given: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return ``given`` in the order of ``needs``, or raise an error that says which one to write, or to leave out."""
    for extra in given.keys() - needs.keys():
        hint = suggest(extra, needs) if needs else "; it takes none"
        raise GateError(f"{name!r} has no parameter {extra!r}{hint}")
    missing = [f"{n} ({rule})" for n, rule in needs.items() if n not in given]
    if missing:
        example = ", ".join(f"{n}=…" for n in needs)
        raise GateError(f"{name!r} needs {' and '.join(missing)}: write {example}; it belongs to the model")
    return {n: _in_range(name, n, rule, given[n]) for n, rule in needs.items()}


def _in_range(owner: str, name: str, rule: Rule, value: Parameter) -> Parameter:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise GateError(f"{owner!r}: {name} must be a floating tensor, not {value.dtype}")
        return value
    if value is None:
        if "None" in rule:
            return None
        raise GateError(f"{owner!r}: {name} must be a number {rule}, not None")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GateError(f"{owner!r}: {name} must be a number {rule} or a tensor, not {value!r}")
    low = -math.inf if rule == "any number" else 0.0
    if not math.isfinite(value) or value < low or (value == 0 and rule.startswith("> 0")):
        raise GateError(f"{owner!r}: {name} must be a finite number {rule}, not {value!r}")
    if value != 0 and not _LEAST <= abs(value) <= _MOST:
        raise GateError(f"{owner!r}: {name} = {value!r} leaves no room in float32; write one from {_LEAST} to {_MOST}")
    return float(value)
