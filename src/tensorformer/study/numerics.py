"""Where the error of an activation comes from: its definition, an approximation, the dtype inside, or the rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorformer.errors import ConfigError, suggest
from tensorformer.gates import Gate, Scalar, activation
from tensorformer.ops.operands import LAYOUTS
from tensorformer.study import numerics_edges as edges
from tensorformer.study.numerics_changes import numbers
from tensorformer.study.numerics_definition import define
from tensorformer.study.numerics_inputs import points
from tensorformer.study.numerics_report import Approximation, Definition, Edge, Fusion, Report, Rounding
from tensorformer.study.numerics_rounding import CUT, LOW, approximation, fusion, given_float32
from tensorformer.study.numerics_target import Target, load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numerics(
    function: Callable[..., Any] | str,
    gate: Gate | Scalar | str,
    *,
    layout: str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Report:
    """Say where an implementation of an activation is off, and why: four figures that do not mix.

    1. Definition: run in float64 (float32 if it refuses), is it the declared function, up to rounding? If not, which
       known mistake explains every output, and which entry of the catalogue is nearest. Its derivative likewise.
    2. Approximation: what it loses in float32 beyond a careful evaluation of the formula that fits.
    3. Rounding: the dtype it computes in.
    4. Fusion: where it rounds, by the share of outputs that each candidate gives bit for bit.

    Args:
        function: of x for a scalar; of g and u for a gate; of one tensor (..., 2·d_ff) with a layout. Or a name:
            reference, fast, native or triton of ``act_and_mul``, or ``"module:function"``.
        gate: the activation it is declared to be, its parameters bound.
        layout: how one tensor holds both branches: gate_up, up_gate or interleaved.
        dtypes: in which to run it: float32, bfloat16, float16. Those it refuses are left out of the report.

    Raises:
        ConfigError: the function is not there, does not fit the declaration, or fails.
        GateError: the activation is unknown, or a parameter of it is missing.
    """
    declared = activation(gate) if isinstance(gate, str) else gate.bind()
    _check(declared, layout, dtypes)
    numbers(declared)
    name = function if isinstance(function, str) else _name(function)
    called = load(function, declared, layout) if isinstance(function, str) else function
    target = Target(called, name, 2 if isinstance(declared, Gate) else 1, layout)
    args = points(target.n_inputs)
    ran = [d for d in dtypes if target.accepts(d, args)]
    if ran:
        target.check_repeats(tuple(a.to(ran[0]) for a in args))
    definition, nearest, holds = define(target, declared)
    approximated: Approximation | None = None
    tails: tuple[Edge, ...] = ()
    limits: tuple[Edge, ...] = ()
    rounding: list[Rounding] = []
    inside: torch.dtype | None = None
    fused: list[Fusion] = []
    if holds is not None and torch.float32 in ran:
        inside, given = given_float32(target, holds)
        rounding.append(given)
        approximated = approximation(target, holds, inside)
        tails, limits = edges.tails(target, holds), edges.limits(target, holds)
    if holds is not None:
        for dtype in (d for d in ran if d in LOW):
            place, given = fusion(target, holds, dtype, inside)
            fused.append(place)
            rounding.append(given)
    verdict = _verdict(definition, approximated, rounding, fused, tails, limits)
    return Report(
        name,
        repr(declared),
        layout,
        definition,
        nearest,
        approximated,
        tuple(rounding),
        tuple(fused),
        tails,
        limits,
        verdict,
    )


def _check(declared: Gate | Scalar, layout: str | None, dtypes: Sequence[torch.dtype]) -> None:
    if layout is not None and isinstance(declared, Scalar):
        raise ConfigError(
            f"layout {layout!r}: {declared.name!r} has one input; leave the layout out, or declare a gate"
        )
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}{suggest(layout, LAYOUTS)}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"dtypes: {dtype} is not one of float32, bfloat16, float16")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _verdict(
    definition: Definition,
    approximated: Approximation | None,
    rounding: Sequence[Rounding],
    fused: Sequence[Fusion],
    tails: tuple[Edge, ...],
    limits: tuple[Edge, ...],
) -> str:
    """The gravest thing found, in one line."""
    if not definition.fits:
        return f"{'definition in doubt' if definition.rough else 'wrong definition'}: {definition.verdict}"
    if definition.derivative is not None and not definition.derivative.fits:
        return f"wrong derivative: {definition.derivative.verdict}"
    for one in rounding:
        if one.dtype == "float32" and one.intermediate != "float32":
            return f"right definition, coarse arithmetic: {one.verdict}"
    if approximated is not None and approximated.beyond > 0:
        lost = edges.lost(tails)
        return f"right definition, approximated in float32: {f'tails lost: {lost}' if lost else approximated.verdict}"
    for one in rounding:
        if one.intermediate != "float32":
            return f"right definition, exact in float32; with {one.dtype} inputs {one.verdict}"
    for one in fused:
        if one.place == CUT:
            return (
                f"right definition, exact in float32; {one.dtype} is cut off, not rounded: up to one ULP, all one way"
            )
    where = next((f"; {f.dtype} is rounded {f.place}" for f in fused if f.place), "")
    far = edges.lost(limits)
    return f"right: nothing but rounding{where}{f'; but {far}' if far else ''}"
