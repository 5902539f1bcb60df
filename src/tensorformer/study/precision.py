"""How exact the activations are in each dtype, in units in the last place; and the page of docs that states it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.config.row_activations import ROW_ACTIVATIONS
from tensorformer.gates import GATES, SCALARS, Scalar
from tensorformer.gates.examples import EXAMPLES, example

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ulp(exact: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return the distance between neighbouring numbers of ``dtype`` at ``exact``."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(info.smallest_normal, info.max)).exponent
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


@final
@dataclass(frozen=True)
class Precision:
    """The largest errors of one scalar in one dtype.

    Args:
        value: of the function, in units in the last place (ULP) of the exact value.
        slope: of the derivative, in ULP of the larger of 1 and its exact value, because it crosses zero.
    """

    value: float
    slope: float


def precision(scalar: Scalar, dtype: torch.dtype) -> Precision:
    """Measure a scalar against its own formula in float64, which the laws hold to 50 digits.

    At every finite number of a 16-bit dtype, and at some 200,000 of float32: even steps over (−40, 40), and both
    signs of a geometric series from 1e-30 to 1e4. Values below 1.2e-35, where intermediate results of float32
    underflow, values that are no normal numbers of the dtype, and points within a twentieth of a zero crossing other
    than x = 0 are not counted.

    Args:
        scalar: with every parameter bound to a number.
        dtype: float32, bfloat16 or float16.
    """
    x = _points(dtype)
    crossing = scalar(x.double() * 0.95).sign() != scalar(x.double() * 1.05).sign()
    found = []
    for f, least in ((scalar, 0.0), (scalar.derivative, 1.0)):
        exact = f(x.double())
        error = (f(x).double() - exact).abs() / ulp(exact.abs().clamp(min=least), dtype)
        size = exact.abs()
        narrow, wide = torch.finfo(dtype), torch.finfo(torch.float32)
        above, below = max(narrow.smallest_normal, wide.smallest_normal * 1024), min(narrow.max, wide.max / 1024)
        counted = ~crossing & (size >= above) & (size <= below)
        found.append(error[counted].max().item() if counted.any() else 0.0)
    return Precision(*found)


def activations_page() -> str:
    """Return ``docs/activations.md``: every activation, where it comes from, who uses it, and how exact it is."""
    return "\n".join([*_introduction(), *_scalars(), *_gates()]) + "\n"


def _points(dtype: torch.dtype) -> Float[Tensor, " n"]:
    if dtype != torch.float32:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        return every[every.isfinite()]
    geometric = torch.logspace(-30, 4, 50_000, dtype=torch.float64)
    return torch.cat([torch.linspace(-40, 40, 100_003, dtype=torch.float64), geometric, -geometric]).float()


def _stated(errors: float) -> str:
    """Round up to two digits: a bound, not an estimate."""
    if errors == 0:
        return "0"
    digits = 1 - math.floor(math.log10(errors))
    rounded = math.ceil(errors * 10**digits - 1e-9) / 10**digits
    return f"{rounded:.{max(0, min(digits, 2))}f}"


def _introduction() -> Iterator[str]:
    yield "# Activations"
    yield ""
    yield "This page is written by `tensorformer study precision --write docs/activations.md`; a test keeps it true."
    yield f"Measured on a CPU with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.split('+')[0]}."
    yield ""
    yield "An error is the largest one found, in units in the last place, rounded up to two digits: 0.5 is a result"
    yield "rounded once and nothing else. Looked at are all numbers of bfloat16 and float16 and 200,000 of float32,"
    yield "but for values beyond 1.2e-35 … 3.3e35 and points within a twentieth of a zero crossing other than 0."
    yield "bfloat16 and float16 are computed in float32 and rounded once. The derivative's error is in units of the"
    yield "larger of 1 and its exact value, since it crosses zero. Errors above ten are those of an exponential whose"
    yield "exponent, as large as 85, is a rounded number: of values near 1e-35."
    given = ", ".join(f"{_written(n)} = {v:g}" for n, v in EXAMPLES.items())
    yield f"Parameters, where there are any: {given}."


def _scalars() -> Iterator[str]:
    yield ""
    yield "## Scalars, for two matrices: down(φ(up(x)))"
    yield ""
    yield "| name | formula | range | smooth | degree | operations | source | used by | also known as |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for s in SCALARS.values():
        bound = example(s)
        low, high = (f"{v:.6g}".replace("inf", "∞").replace("-", "−") for v in bound.image)
        yield _row(
            f"`{s.name}`",
            f"${s.latex}$",
            f"{low} … {high}",
            {None: "C^∞", -1: "jumps"}.get(bound.smoothness, f"C^{bound.smoothness}"),
            s.degree,
            _counted(s.cost),
            s.source,
            ", ".join(s.models),
            ", ".join(f"`{a}`" for a in s.aliases),
        )
    yield ""
    yield "## How exact they are"
    yield ""
    yield "| name |" + "".join(f" {d} value | {d} derivative |" for d in DTYPES)
    yield "|---|" + "---|---|" * len(DTYPES)
    for s in SCALARS.values():
        measured = [precision(example(s), dtype) for dtype in DTYPES.values()]
        yield _row(f"`{s.name}`", *(_stated(e) for p in measured for e in (p.value, p.slope)))


def _gates() -> Iterator[str]:
    yield ""
    yield "## Gates, for three matrices: down(φ(gate(x)) · ψ(up(x)))"
    yield ""
    yield "| name | formula | φ | ψ | degree | operations | source | used by | also known as |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for g in GATES.values():
        yield _row(
            f"`{g.name}`",
            f"${g.latex}$",
            f"`{g.gate.name}`",
            f"`{g.value.name}`",
            g.degree,
            _counted(g.cost),
            g.source,
            ", ".join(g.models),
            ", ".join(f"`{a}`" for a in g.aliases),
        )
    yield ""
    rows = ", ".join(f"`{a.name}` ({', '.join(a.models) or a.source})" for a in ROW_ACTIVATIONS.values())
    yield f"What needs the whole row of features is a layer, in `nn/row_activations.py`: {rows}."


def _written(parameter: str) -> str:
    from tensorformer.gates import expr

    return f"${expr.latex(expr.symbol(parameter))}$"


def _counted(cost: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in cost.items()) or "none"


def _row(*cells: object) -> str:
    return "| " + " | ".join("–" if c is None else str(c).replace("|", r"\|") for c in cells) + " |"
