"""The first figure: is it the function it is said to be, and is its derivative that function's?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.study import numerics_changes as changes
from tensorformer.study.numerics_inputs import points
from tensorformer.study.numerics_misfit import Misfit, misfit
from tensorformer.study.numerics_report import Definition, Derivative, Nearest, place, word
from tensorformer.study.numerics_search import Hypothesis, Search, bound, structural
from tensorformer.study.numerics_target import Target, gradients

# A relative misfit below which no constant, however mistyped, is looked for: 0.7978845608 for √(2/π) is 1e-12 off.
_SHARP = 1e-8
# One up to which a function that no mistake explains may be an approximation of the declared one.
_ROUGH = 1e-3


def define(target: Target, declared: Gate | Scalar) -> tuple[Definition, Nearest, Hypothesis | None]:
    """Return what the implementation computes, the nearest entry of the catalogue, and the hypothesis that fits.

    Raises:
        ConfigError: it runs neither in float64 nor in float32.
    """
    args = points(target.n_inputs)
    if not target.accepts(torch.float64, args):
        # Inputs that float32 has as well: the formula must be asked at the very same ones.
        args = tuple(a.float() for a in args)
    with torch.no_grad():
        got = target(args)
    exact = tuple(a.double() for a in args)
    search = Search(got, exact, declared, target.layout)
    plain = Hypothesis("", declared)
    found = search.misfit(plain)
    mistake = None
    if found.fits and found.noise < 1e-3 * found.smooth and found.smooth > _SHARP:
        # So small that it may be an approximation, so clear that a constant cut short would show.
        sharp = Search(got, exact, declared, target.layout, found.smooth / 100)
        mistake = sharp.mistake()
        search, found = (sharp, sharp.misfit(plain)) if mistake else (search, found)
    elif not found.fits:
        mistake = search.mistake()
    nearest, near = search.nearest(mistake)
    rough = mistake is None and not nearest.fits and near.form is declared and found.smooth < _ROUGH
    holds = plain if found.fits or rough else mistake or (near if nearest.fits else None)
    derivative = None
    if holds is not None:
        left = search.misfit(holds)
        # Where it rounds coarsely inside, or approximates, a gradient is off as well, and at other places.
        derivative = _derivative(target, args, holds, 2 * max(left.tolerance, left.smooth), left.coarse)
    definition = Definition(
        found.fits,
        rough,
        found.deviation,
        found.at,
        word(args[0].dtype),
        mistake and mistake.what,
        derivative,
        _verdict(declared, found, mistake, nearest, rough),
    )
    return definition, nearest, holds


def _verdict(declared: Gate | Scalar, found: Misfit, mistake: Hypothesis | None, nearest: Nearest, rough: bool) -> str:
    if found.fits:
        coarse = ", as far as its coarse arithmetic lets one see" if found.coarse else ""
        return f"it is {declared!r}{coarse}"
    if rough:
        return (
            f"it is roughly {declared!r}, {found.deviation:.3g} off at {place(found.at)}: no known mistake explains "
            "that; a coarse approximation, or a mistake of its own"
        )
    other = nearest.fits and nearest.name != declared.name
    what = mistake.what if mistake else f"it computes {named(nearest)}" if nearest.fits else ""
    if mistake and other:
        what += f"; so it is {named(nearest)}"
    if not what:
        what = f"no known mistake explains it; nearest is {named(nearest)}, {nearest.deviation:.3g} off"
    return f"it is not {declared!r}, {found.deviation:.3g} off at {place(found.at)}: {what}"


def named(nearest: Nearest) -> str:
    """Return an entry's name with its parameters."""
    numbers = ", ".join(f"{n}={v:.6g}" for n, v in nearest.parameters.items())
    return f"{nearest.name}({numbers})" if numbers else nearest.name


def _derivative(
    target: Target, args: tuple[Tensor, ...], holds: Hypothesis, floor: float, coarse: torch.dtype | None
) -> Derivative | None:
    got = gradients(target, args)
    if got is None:
        return None
    exact = tuple(a.double() for a in args)
    truth = _slopes(holds, exact)
    # An input rounded across a kink has the other side's slope.
    moved = truth if coarse is None else _slopes(holds, tuple(a.to(coarse).double() for a in exact))
    names = ("x",) if len(args) == 1 else ("g", "u")
    for i, name in enumerate(names):
        scale = _size(truth[i], exact, i)
        crossed = (moved[i] - truth[i]).abs() > 0.1 * scale
        seen = truth[i].where(crossed, got[i])
        compare = functools.partial(misfit, seen, args=exact, scale=scale, floor=floor)
        found = compare(truth[i])
        if not found.fits:
            what = _explained(i, seen, truth[i], exact, holds, compare)
            text = f"its derivative by {name} is wrong, {found.deviation:.3g} off at {place(found.at)}: {what}"
            return Derivative(False, found.deviation, name, text)
    return Derivative(True, 0.0, "", "its derivative is the formula's")


def _explained(
    i: int,
    got: Tensor,
    truth: Tensor,
    args: tuple[Tensor, ...],
    holds: Hypothesis,
    compare: Callable[[Tensor], Misfit],
) -> str:
    if not got.isfinite().all():
        return "it is not finite there"
    if not got.any():
        return "it is zero everywhere"
    factor = ((got * truth).sum() / truth.square().sum()).item()
    if compare(factor * truth).fits:
        return f"it is {factor:.7g} times what it should be"
    for what, other in _others(holds):
        if compare(_slopes(other, args)[i]).fits:
            return f"it is that of {what}"
    return "no known mistake explains it"


def _others(holds: Hypothesis) -> Iterator[tuple[str, Hypothesis]]:
    for hypothesis in structural(replace(holds, what="")):
        yield f"a formula where {hypothesis.what}", hypothesis
    known = changes.numbers(holds.form)
    for entry in (GATES if isinstance(holds.form, Gate) else SCALARS).values():
        form = bound(entry, known)
        if form is not None:
            yield repr(form), replace(holds, form=form)


def _slopes(hypothesis: Hypothesis, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = gradients(hypothesis, args)
    return tuple(torch.zeros_like(a) for a in args) if found is None else found


def _size(truth: Tensor, args: tuple[Tensor, ...], i: int) -> Tensor:
    others = [a.abs() for k, a in enumerate(args) if k != i]
    return functools.reduce(torch.maximum, others, truth.abs()).clamp(min=1)
