"""What ``study numerics`` finds: four figures, each with a sentence, and one line over all."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Nearest:
    """The entry of the catalogue that comes closest; ``fits`` where nothing but rounding is left."""

    name: str
    parameters: dict[str, float]
    deviation: float
    fits: bool


@dataclass(frozen=True)
class Derivative:
    """The gradient that autograd gives, against the derivative of the formula that the values fit.

    ``deviation`` is the largest difference at a point where it is more than rounding, 0 where there is none; ``by``
    names the branch it was found in.
    """

    fits: bool
    deviation: float
    by: str
    verdict: str


@dataclass(frozen=True)
class Definition:
    """Which function it is. ``deviation`` from the declared one: the largest difference, at ``at``, in ``precision``,
    0 where there is none but rounding; ``mistake`` is the known mistake that explains it, if one does. ``rough`` where
    it is off by so little, and so unlike a mistake, that it may be an approximation."""

    fits: bool
    rough: bool
    deviation: float
    at: tuple[float, ...]
    precision: str
    mistake: str | None
    derivative: Derivative | None
    verdict: str


@dataclass(frozen=True)
class Approximation:
    """What float32 loses beyond rounding.

    ``ulp``, ``relative`` and ``absolute`` are the largest errors against the formula (where its value is a normal
    number), ``at`` is where ``ulp`` is; ``beyond`` is what a careful evaluation of the same formula does not explain.
    """

    ulp: float
    relative: float
    absolute: float
    beyond: float
    at: tuple[float, ...]
    verdict: str


@dataclass(frozen=True)
class Rounding:
    """In which dtype it computes when given ``dtype``; ``ulp`` is its largest error in units of ``dtype``."""

    dtype: str
    intermediate: str
    ulp: float
    verdict: str


@dataclass(frozen=True)
class Fusion:
    """Where it rounds when given ``dtype``: the share of outputs that each candidate reproduces bit for bit.

    ``place`` is the candidate that reproduces them all but for a few in a thousand, None where none does.
    """

    dtype: str
    place: str | None
    shares: dict[str, float]
    verdict: str


@dataclass(frozen=True)
class Edge:
    """One point far out, in float32: what came, what the formula (or its limit) is there, and whether they agree."""

    at: tuple[float, ...]
    got: float
    truth: float
    agrees: bool


@dataclass(frozen=True)
class Report:
    """Where an implementation's error comes from."""

    implementation: str
    declared: str
    layout: str | None
    definition: Definition
    nearest: Nearest
    approximation: Approximation | None
    rounding: tuple[Rounding, ...]
    fusion: tuple[Fusion, ...]
    tails: tuple[Edge, ...]
    limits: tuple[Edge, ...]
    verdict: str


def place(at: tuple[float, ...]) -> str:
    """Return a point as text."""
    return ", ".join(f"{n} = {v:.3g}" for n, v in zip(("x",) if len(at) == 1 else ("g", "u"), at, strict=True))


def count(number: float) -> str:
    """Return a number of units in the last place as text."""
    return f"{number:.2g}" if number < 1000 else f"{number:.1e}"


def word(dtype: torch.dtype) -> str:
    """Return a dtype as text."""
    return str(dtype).removeprefix("torch.")
