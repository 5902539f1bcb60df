"""What runs on a tile, one program for every formula; and what is known of a gate without its formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensorformer.gates import Gate, Scalar

if TYPE_CHECKING:
    from tensorformer.gates.tile_source import Program

_EXACT = ("x", "relu(x)")
_PROGRAMS: dict[tuple[Any, ...], Program] = {}
_REMEMBERED = 512


def program(gate: Gate, dtype: torch.dtype, wanted: tuple[str, ...]) -> Program:
    """Return what computes ``wanted`` of a bound gate in ``dtype``, writing it on first use.

    Args:
        gate: parameters that are numbers become part of the program, tensors its last arguments.
        dtype: float32 or float64; bfloat16 or float16 as well for a gate that ``is_exact``.
        wanted: ``("h",)`` for h = φ(g)·ψ(u), or some of ``("dg", "du")``: dh·∂h/∂g and dh·∂h/∂u.

    Raises:
        GateError: the formula uses a function that has no form there.
    """
    φ, ψ = gate.gate, gate.value
    key = (φ._formula, φ._names, _numbers(φ), ψ._formula, ψ._names, _numbers(ψ), dtype, wanted)
    found = _PROGRAMS.get(key)
    if found is None:
        # SymPy takes half a second to load: only here.
        from tensorformer.gates.tile_source import write

        if len(_PROGRAMS) >= _REMEMBERED:
            _PROGRAMS.pop(
                next(iter(_PROGRAMS)), None
            )  # of a number that changes at every step, only the last is of use
        found = _PROGRAMS[key] = write(gate, dtype, wanted)
    return found


def is_exact(gate: Gate) -> bool:
    """Say whether φ, ψ and their slopes are exact in any dtype, so that a product of them is rounded once."""
    return gate.gate._formula in _EXACT and gate.value._formula in _EXACT


def _numbers(scalar: Scalar) -> tuple[float | None, ...]:
    given = scalar._given
    return tuple(None if isinstance(v, Tensor) else v for v in given) if given else given
