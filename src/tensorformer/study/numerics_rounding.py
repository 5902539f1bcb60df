"""The other three figures, against the formula that fits: approximation, the dtype inside, and where it rounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.study.numerics_inputs import points
from tensorformer.study.numerics_report import Approximation, Fusion, Rounding, count, place, word
from tensorformer.study.numerics_search import Hypothesis
from tensorformer.study.numerics_stepwise import stepwise
from tensorformer.study.numerics_target import Target
from tensorformer.study.precision import ulp as ulp_of

LOW = (torch.bfloat16, torch.float16)
CUT = "once, at the end, by cutting digits off"
# Of outputs that must agree bit for bit. A value computed in float32 falls on the other side of a rounding boundary
# less than once in a thousand times.
REPRODUCES, _MOSTLY = 0.995, 0.9
# Root mean square error, relative, of arithmetic in each: a few roundings of 2⁻⁹ and 2⁻¹², uniformly distributed.
_SCATTER = ((torch.bfloat16, 6e-4), (torch.float16, 6e-5))


def approximation(target: Target, holds: Hypothesis, inside: torch.dtype) -> Approximation:
    """Measure what float32 loses beyond what the same formula loses when each operation is rounded to ``inside``."""
    args = tuple(a.float() for a in points(target.n_inputs))
    truth = _truth(holds, args)
    with torch.no_grad():
        got = target(args)
        careful = _stepwise(holds, args, inside).double()
    normal = truth.abs() >= torch.finfo(torch.float32).smallest_normal
    error = ((got - truth).abs() / ulp_of(truth, torch.float32)).nan_to_num(nan=torch.inf).where(normal, 0.0)
    expected = ((careful - truth).abs() / ulp_of(truth, torch.float32)).nan_to_num(nan=torch.inf).where(normal, 0.0)
    # By rows: where the argument of an exponential is large, any evaluation loses as much.
    beyond = (error.amax(1) - 2 * expected.amax(1) - 1).nan_to_num(nan=0.0).clamp(min=0).max().item()
    worst = int(error.argmax())
    ulp, at = error.max().item(), tuple(a.flatten()[worst].item() for a in args)
    relative = ((got - truth).abs() / truth.abs()).where(normal, 0.0).max().item()
    absolute = (got - truth).abs().max().item()
    text = f"{count(ulp)} ULP of float32 ({100 * relative:.2g} % of the value) off at {place(at)}"
    if beyond == 0:
        text = f"none: at most {text}, which rounding to {word(inside)} explains"
    else:
        text = f"{text}, more than rounding explains; at most {absolute:.2g} anywhere"
    return Approximation(ulp, relative, absolute, beyond, at, text)


def given_float32(target: Target, holds: Hypothesis) -> tuple[torch.dtype, Rounding]:
    """Find the coarsest dtype that float32 inputs pass through: float32, if none."""
    args = tuple(a.float() for a in points(target.n_inputs))
    with torch.no_grad():
        got, truth = target(args), _truth(holds, args)
        inside = next((d for d in LOW if _passes(target, holds, args, got, d)), None)
    known = got.isfinite() & (truth != 0)
    large = known & (truth.abs() > 0.1 * args[0].abs().double())
    if inside is None:
        scatter = ((got - truth) / truth)[large].square().mean().sqrt().item()
        inside = next((dtype for dtype, least in _SCATTER if scatter > least), torch.float32)
    ulp = ((got - truth).abs() / ulp_of(truth, torch.float32))[known].median().item()
    text = f"arithmetic in {word(inside)}; typically {count(ulp)} ULP of float32 off"
    return inside, Rounding("float32", word(inside), ulp, text)


def _passes(target: Target, holds: Hypothesis, args: tuple[Tensor, ...], got: Tensor, dtype: torch.dtype) -> bool:
    """Whether nothing changes when an input, or the output, is rounded to ``dtype`` first."""
    exact = holds(args)
    tell = exact != exact.to(dtype).float()
    if _share(got.float().to(dtype).double() == got, tell) > REPRODUCES:
        return True
    for i in range(len(args)):
        rounded = tuple(a.to(dtype).float() if k == i else a for k, a in enumerate(args))
        tell = holds(rounded) != holds(args)
        if _share(target(rounded) == got, tell) > REPRODUCES:
            return True
    return False


def _share(same: Tensor, tell: Tensor) -> float:
    return same[tell].double().mean().item() if bool(tell.any()) else 0.0


def fusion(
    target: Target, holds: Hypothesis, dtype: torch.dtype, inside: torch.dtype | None
) -> tuple[Fusion, Rounding]:
    """Run in ``dtype`` and find which places of rounding, and which dtype inside, give the very same outputs.

    Args:
        target: the implementation.
        holds: the formula it computes.
        dtype: bfloat16 or float16.
        inside: the dtype it computes float32 inputs in; None if it was not run in float32.
    """
    args = tuple(a.to(dtype) for a in points(target.n_inputs))
    with torch.no_grad():
        got = target(args)
    found = [_place(target, holds, args, got, own) for own in ((False, True) if inside == torch.float32 else (False,))]
    # Against its own float32 result where that is nearer: what an approximation loses is no matter of rounding.
    best, within, shares, ulp = max(found, key=lambda f: max(f[2].values()))
    reproduced = shares[best] >= REPRODUCES
    if reproduced:
        text = f"{best} ({shares[best]:.1%} of the outputs bit for bit)"
    else:
        within = torch.float32 if ulp < 0.51 else within if shares[best] > _MOSTLY else dtype
        text = f"none of the places tried; nearest is {best} ({shares[best]:.0%})"
    kind = "arithmetic in float32" if within == torch.float32 else f"arithmetic in {word(within)}"
    rounding = Rounding(word(dtype), word(within), ulp, f"{kind}; at most {count(ulp)} ULP of {word(dtype)} off")
    return Fusion(word(dtype), best if reproduced else None, shares, text), rounding


def _place(
    target: Target, holds: Hypothesis, args: tuple[Tensor, ...], got: Tensor, own: bool
) -> tuple[str, torch.dtype, dict[str, float], float]:
    """Return the best candidate, its dtype inside, every candidate's share, and the largest error in ULP."""
    dtype = args[0].dtype
    whole = _truth(holds, args)
    factor = holds.form.gate(holds.read(args)[0].double()) if isinstance(holds.form, Gate) else whole
    if own:
        with torch.no_grad():
            whole = target(tuple(a.float() for a in args))
            factor = _own_factor(target, holds, args, whole)
    tried: list[tuple[str, torch.dtype, Tensor]] = []
    for name, within, values in _candidates(holds, args, whole, factor):
        # Where two can't be told apart (an up branch that is linear has nothing to round) the simpler one speaks.
        if not any(torch.equal(values, other) for _, _, other in tried):
            tried.append((name, within, values))
    shares = {n: (torch.eq(got, v) | (got.isnan() & v.isnan())).double().mean().item() for n, _, v in tried}
    best, within, _ = max(tried, key=lambda t: shares[t[0]])
    normal = whole.abs().float().to(dtype).isfinite() & (whole.abs() >= torch.finfo(dtype).smallest_normal)
    error = ((got - whole).abs() / ulp_of(whole, dtype)).nan_to_num(nan=torch.inf).where(normal, 0.0)
    return best, within, shares, error.max().item()


def _own_factor(target: Target, holds: Hypothesis, args: tuple[Tensor, ...], whole: Tensor) -> Tensor:
    """Return φ as the implementation computes it in float32: with ψ = 1, where there is such a u, else by division."""
    if not isinstance(holds.form, Gate):
        return whole
    g, u = (a.double() for a in holds.read(args))
    if holds.reading is None:
        for number in (1.0, 0.0):
            one = torch.full_like(args[1], number, dtype=torch.float32)
            if bool((holds.form.value(one.double()) == 1).all()):
                return target((args[0].float(), one))
    divided = whole / holds.form.value(u)
    return divided.where(divided.isfinite() & (divided != 0), holds.form.gate(g))


def _candidates(
    holds: Hypothesis, args: tuple[Tensor, ...], whole: Tensor, f: Tensor
) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """Yield the places where it may round: in words, the dtype inside, and the outputs, in float64."""

    def to(x: Tensor, *dtypes: torch.dtype) -> Tensor:
        for d in dtypes:
            x = x.float().to(d)
        return x.double()

    dtype, single = args[0].dtype, torch.float32
    other = next(d for d in LOW if d != dtype)
    coarse = word(other)
    form = holds.form
    yield "once, at the end", single, to(whole, dtype)
    yield CUT, single, _cut(whole.float(), dtype).double()
    if isinstance(form, Gate):
        v = form.value(holds.read(args)[1].double())
        yield "after φ and at the end", single, to(to(f, dtype) * v, dtype)
        yield "after ψ and at the end", single, to(f * to(v, dtype), dtype)
        yield "after φ, after ψ and at the end", single, to(to(f, dtype) * to(v, dtype), dtype)
        yield f"φ in {coarse}, then at the end", other, to(to(f, other) * v, dtype)
        yield f"φ in {coarse}, then after φ and at the end", other, to(to(f, other, dtype) * v, dtype)
        both = to(f, other) * to(v, other)
        yield f"φ, ψ and the product in {coarse}, then at the end", other, to(both, other, dtype)
    yield f"once in {coarse}, then at the end", other, to(whole, other, dtype)
    for inside in (dtype, other):
        yield f"after every operation, in {word(inside)}", inside, to(_stepwise(holds, args, inside), dtype)


def _cut(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``, rounded towards zero."""
    near = x.to(dtype)
    # The bits of a float are its size, after the sign: one less is the neighbour nearer to zero.
    return torch.where(near.abs() > x.abs(), (near.view(torch.int16) - 1).view(dtype), near)


def _stepwise(holds: Hypothesis, args: tuple[Tensor, ...], inside: torch.dtype) -> Tensor:
    return stepwise(holds.form, tuple(a.to(inside) for a in holds.read(args)))


def _truth(holds: Hypothesis, args: tuple[Tensor, ...]) -> Tensor:
    return holds(tuple(a.double() for a in args))
