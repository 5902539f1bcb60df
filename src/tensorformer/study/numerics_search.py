"""Which formula an implementation computes: the declared one, one with a known mistake, or another of the catalogue."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.study import numerics_changes as changes
from tensorformer.study.numerics_changes import Free, Values
from tensorformer.study.numerics_fit import fit
from tensorformer.study.numerics_misfit import COARSEST, TOLERANCE, Misfit, misfit, size
from tensorformer.study.numerics_report import Nearest
from tensorformer.study.numerics_stepwise import stepwise
from tensorformer.study.numerics_target import readings

# Scatter above this is no longer float32's; a formula further than that from itself has overflowed.
_SEEN, _OVERFLOWN = 1e-5, 0.01
Reading = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Hypothesis:
    """That the implementation computes ``form``, of the branches as ``reading`` has them; ``what`` in words."""

    what: str
    form: Gate | Scalar
    reading: Reading | None = None

    def __call__(self, args: tuple[Tensor, ...]) -> Tensor:
        """Return what it would compute."""
        return self.form(*self.read(args))

    def read(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the branches as it takes them."""
        return args if self.reading is None else self.reading(args[0], args[1])


@final
class Search:
    """Hypotheses against the outputs of an implementation.

    Args:
        got: its outputs in float64, (rows, ROW).
        args: the inputs they belong to.
        declared: the activation it is said to compute.
        layout: in which the branches were handed over.
        floor: the smallest misfit that counts.
    """

    def __init__(
        self,
        got: Tensor,
        args: tuple[Tensor, ...],
        declared: Gate | Scalar,
        layout: str | None,
        floor: float = TOLERANCE,
    ) -> None:
        self.got, self.args, self.declared, self.floor = got, args, declared, floor
        self.readings = list(readings(layout)) if len(args) == 2 else []

    def misfit(self, hypothesis: Hypothesis) -> Misfit:
        """Compare the outputs with what a hypothesis says."""
        truth = hypothesis(self.args)
        found = misfit(self.got, truth, self.args, floor=self.floor)
        if not _SEEN <= found.noise <= COARSEST:
            return found
        # Coarse arithmetic is not noise alone: near 1 a sigmoid stays where it is. The formula itself says how much.
        for dtype in (torch.float16, torch.bfloat16):
            rounded = stepwise(hypothesis.form, tuple(a.to(dtype) for a in hypothesis.read(self.args)))
            own = misfit(rounded.double(), truth, self.args)
            if found.noise < 1.6 * own.noise and own.smooth < _OVERFLOWN:
                allowed = misfit(self.got, truth, self.args, floor=max(self.floor, 2 * own.smooth))
                if allowed.fits or found.noise < own.noise:
                    return replace(allowed, coarse=dtype)
        return found

    def mistake(self) -> Hypothesis | None:
        """Return the known mistake that explains the outputs: the one with the fewest changes."""
        plain = Hypothesis("", self.declared)
        read = [replace(plain, what=what, reading=how) for what, how in self.readings]
        left_out = list(structural(plain))
        for stage in (
            read,
            left_out,
            self._fitted(plain, parameters(plain)),
            self._fitted(plain, constants(plain)),
            (h for r in read for h in structural(r)),
            (h for r in read for h in self._fitted(r, every(r))),
            (h for s in left_out for h in self._fitted(s, every(s))),
        ):
            for hypothesis in stage:
                if self._fits(hypothesis):
                    return hypothesis
        return None

    def nearest(self, mistake: Hypothesis | None) -> tuple[Nearest, Hypothesis]:
        """Return the entry of the catalogue that comes closest: one that fits as it is, or with its numbers fitted.

        Args:
            mistake: what explains the outputs already: the branches are read as it says.
        """
        reading = mistake and mistake.reading
        ready = [Hypothesis("", form, reading) for form in self._ready()]
        tried = [(found, h) for h in ready if (found := self._measured(h)) is not None]
        for found, hypothesis in tried:
            if found.fits:
                return self._near(found, hypothesis)
        known = changes.numbers(self.declared)
        loose = [e.bind(**changes.begin(e, known)) for e in self._entries() if e.needs]
        for n_needs in sorted({len(form.needs) for form in loose}):
            group = [Hypothesis("", form, reading) for form in loose if len(form.needs) == n_needs]
            fitted = [
                (found, h)
                for one in group
                for h in self._fitted(one, [changes.several(one.form, list(one.form.needs))])
                if (found := self._measured(h)) is not None
            ]
            fits = [h for found, h in fitted if found.fits]
            if fits:
                best = min(fits, key=lambda h: (h.form.name != self.declared.name, self._difference(h)))
                return self._near(self.misfit(best), best)
            # Where a mistake explains it, numbers fitted to another formula would only confuse.
            tried += [] if mistake else fitted
        return self._near(*min(tried, key=lambda t: t[0].smooth))

    def _entries(self) -> list[Gate | Scalar]:
        return list((GATES if isinstance(self.declared, Gate) else SCALARS).values())

    def _ready(self) -> Iterator[Gate | Scalar]:
        """The declared activation, it without what may be left out, and the entries that its numbers suffice for."""
        yield self.declared
        for name, rule in self.declared.needs.items():
            if "None" in rule:
                yield self.declared.bind(**{**self.declared.parameters, name: None})
        known = changes.numbers(self.declared)
        for entry in self._entries():
            form = bound(entry, known)
            if form is not None and entry.name != self.declared.name:
                yield form

    def _near(self, found: Misfit, hypothesis: Hypothesis) -> tuple[Nearest, Hypothesis]:
        numbers = changes.numbers(hypothesis.form)
        return Nearest(hypothesis.form.name, numbers, self._difference(hypothesis), found.fits), hypothesis

    def _difference(self, hypothesis: Hypothesis) -> float:
        return (self.got - hypothesis(self.args)).abs().nan_to_num(nan=math.inf).max().item()

    def _fits(self, hypothesis: Hypothesis) -> bool:
        found = self._measured(hypothesis)
        return found is not None and found.fits

    def _measured(self, hypothesis: Hypothesis) -> Misfit | None:
        try:
            return self.misfit(hypothesis)
        except GateError:  # a changed formula that has no printed form
            return None

    def _fitted(self, base: Hypothesis, free: Iterator[Free] | list[Free]) -> Iterator[Hypothesis]:
        # A third of the rows is enough to find a number; all of them judge it.
        some = slice(None, None, 3)
        scale = size(self.got.nan_to_num(), self.args)

        def residual(rows: slice, form: Gate | Scalar) -> Tensor:
            values = replace(base, form=form)(tuple(a[rows] for a in self.args))
            return (self.got[rows] - values) / scale[rows]

        for one in free:
            found = fit(one, functools.partial(residual, some), functools.partial(residual, slice(None)))
            if found is not None:
                yield replace(base, what=_joined(base.what, one.say(found[0])), form=found[1])


def structural(base: Hypothesis) -> Iterator[Hypothesis]:
    """Yield the formula with a thing left out or put elsewhere: one first, then one in each branch."""
    if isinstance(base.form, Scalar):
        for what, form in changes.structural(base.form):
            yield replace(base, what=_joined(base.what, what), form=form)
        return
    gate = base.form
    phi = [(f"{what} (of the gate branch)", form) for what, form in changes.structural(gate.gate)]
    psi = [(f"{what} (of the up branch)", form) for what, form in changes.structural(gate.value)]
    for what, form in phi:
        yield replace(base, what=_joined(base.what, what), form=replace(gate, gate=form))
    for what, form in psi:
        yield replace(base, what=_joined(base.what, what), form=replace(gate, value=form))
    for a, f in phi:
        for b, v in psi:
            yield replace(base, what=_joined(base.what, a, b), form=replace(gate, gate=f, value=v))


def parameters(base: Hypothesis) -> Iterator[Free]:
    """Yield the parameters left to find: each, then all; then those of one branch, which a gate may share."""
    yield from changes.parameters(base.form)
    if isinstance(base.form, Gate):
        yield from _in_branches(base.form, changes.parameters)


def every(base: Hypothesis) -> Iterator[Free]:
    """Yield all the parameters at once left to find."""
    if numbers := changes.numbers(base.form):
        yield changes.several(base.form, list(numbers))


def constants(base: Hypothesis) -> Iterator[Free]:
    """Yield the numbers in the formula left to find, one at a time."""
    if isinstance(base.form, Scalar):
        yield from changes.constants(base.form)
    else:
        yield from _in_branches(base.form, changes.constants)


def _in_branches(gate: Gate, of: Callable[[Scalar], Iterator[Free]]) -> Iterator[Free]:
    for one in of(gate.gate):
        yield replace(
            one,
            make=lambda v, one=one: replace(gate, gate=one.make(v)),
            say=lambda v, one=one: f"{one.say(v)} (of the gate branch)",
        )
    for one in of(gate.value):
        yield replace(
            one,
            make=lambda v, one=one: replace(gate, value=one.make(v)),
            say=lambda v, one=one: f"{one.say(v)} (of the up branch)",
        )


def bound(entry: Gate | Scalar, known: Values) -> Gate | Scalar | None:
    """Return the entry with the declared activation's numbers, or None where they are not enough."""
    return entry.bind(**{n: known[n] for n in entry.needs}) if entry.needs.keys() <= known.keys() else None


def _joined(*parts: str) -> str:
    return "; ".join(p for p in parts if p)
