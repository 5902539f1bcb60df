"""The laws that an implementation is held to, wherever it comes from: what it gets wrong, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.act_and_mul import reference
from tensorformer.ops.operands import LAYOUTS, halves

Forward = Callable[[Gate, Tensor, Tensor], Tensor]
Backward = Callable[[Gate, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]

# Where g lies, how g and u are laid out in memory, and their shape.
_CASES = (
    ("around zero", "contiguous", (1,)),
    ("around zero", "contiguous", (3,)),
    ("around zero", "shifted", (7,)),
    ("around zero", "gate_up", (5, 63)),
    ("around zero", "up_gate", (2, 3, 7)),
    ("around zero", "interleaved", (3, 257)),
    ("around zero", "transposed", (9, 33)),
    ("around zero", "rows alike", (6, 31)),
    ("around zero", "columns alike", (6, 31)),
    ("around zero", "gate_up", (41, 1711)),
    ("around zero", "gate_up", (0, 5)),
    ("around zero", "contiguous", (3, 0)),
    ("in the left tail", "gate_up", (4, 257)),
    ("in the right tail", "contiguous", (257,)),
    ("far out", "interleaved", (1368,)),
)
_PLACES = {  # spread and centre of g
    "around zero": (2.0, 0.3),
    "in the left tail": (1.5, -8.0),
    "in the right tail": (1.5, 8.0),
    "far out": (8.0, 1.0),
}


class _Case(NamedTuple):
    place: str
    layout: str
    g: Tensor
    u: Tensor
    dh: Tensor


class _Allowed(NamedTuple):
    """How large an error may be: of any number, and of a number by its own size."""

    absolute: float
    relative: float | None


class _Truth(NamedTuple):
    """h, dg and du of a case: by the formula in float64, and by the reference in the dtype of the case."""

    exact: dict[str, Tensor]
    rounded: dict[str, Tensor]


def violations(
    forward: Forward,
    backward: Backward,
    gate: Gate,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    slack: float = 0.0,
) -> list[str]:
    """Run an implementation on fixed inputs and say what is wrong with it; nothing is, where the list is empty.

    Each result is compared with the formula in float64. Around zero, and in either tail, an error may be twice the
    largest of the reference there in the same dtype, and two units in the last place of the largest number; in a
    tail, where numbers are of many sizes, the same holds of each by itself. Sizes are odd, strides of every kind (of
    dh as well), outputs poisoned with NaN; infinities must give the formula's limits, NaN gives NaN.

    Args:
        forward: ``forward(gate, g, u) -> h``.
        backward: ``backward(gate, g, u, dh, dg, du)``, which fills dg and du, either of them None if not wanted.
        gate: bound.
        dtype: of the operands. Before bfloat16 and float16 float32 is tried: a derivative 1 % off hides in the
            rounding of bfloat16, and not in that of float32.
        device: where to run; truth is always computed on the CPU.
        slack: what an error may be besides, of the largest number: for hardware whose exp and division are rough.

    Returns:
        One line for each fault found; those in float32 alone if there are any.
    """
    wide = () if dtype in (torch.float32, torch.float64) else (torch.float32,)
    for tried in (*wide, dtype):
        cases = [(case, _truth(gate, case)) for case in _cases(tried, torch.device(device))]
        allowed = _allowed(cases, slack)
        found = [
            f"{case.place}, {case.layout}, {tuple(case.g.shape)}, {str(tried).removeprefix('torch.')}: {fault}"
            for case, truth in cases
            for fault in _faults(forward, backward, gate, case, truth, allowed[case.place])
        ]
        if found:
            return found
    return []


def _truth(gate: Gate, case: _Case) -> _Truth:
    operands = [x.cpu() for x in (case.g, case.u, case.dh)]
    return _Truth(*(_reference(gate, *(x.to(d) for x in operands)) for d in (torch.float64, case.g.dtype)))


def _allowed(cases: list[tuple[_Case, _Truth]], slack: float) -> dict[str, dict[str, _Allowed]]:
    """Return the largest error each output may have, place by place: of one number it would be a matter of luck."""
    found: dict[str, dict[str, _Allowed]] = {}
    for place in dict.fromkeys(case.place for case, _ in cases):
        truths = [truth for case, truth in cases if case.place == place]
        found[place] = {name: _bound(name, truths, slack, "tail" in place) for name in ("h", "dg", "du")}
    return found


def _bound(name: str, truths: list[_Truth], slack: float, tail: bool) -> _Allowed:
    info = torch.finfo(truths[0].rounded[name].dtype)
    own = largest = relative = 0.0
    for truth in truths:
        exact, rounded = truth.exact[name], truth.rounded[name].double()
        ordinary = exact.isfinite() & (exact.abs() <= info.max / 4)
        if ordinary.any():
            errors = (rounded - exact)[ordinary].abs()
            own = max(own, errors.nan_to_num(0.0, posinf=0.0).max().item())
            largest = max(largest, exact[ordinary].abs().max().item())
            sizes = exact[ordinary].abs().clamp(min=info.tiny)
            relative = max(relative, (errors.nan_to_num(0.0, posinf=0.0) / sizes).max().item())
    # float64 has no truth of its own: eight units for the way there, and as many hundreds in an exponent.
    own, relative = (own, relative) if info.bits < 64 else (8 * info.eps * largest, 800 * info.eps)
    return _Allowed(
        2 * (own + info.eps * largest) + slack * largest + 2 * info.tiny,
        2 * (relative + info.eps) + slack if tail else None,
    )


def _faults(
    forward: Forward, backward: Backward, gate: Gate, case: _Case, truth: _Truth, allowed: dict[str, _Allowed]
) -> Iterator[str]:
    g, u, dh = case.g, case.u, case.dh
    before = [x.clone() for x in (g, u, dh)]
    try:
        h = forward(gate, g, u)
        pairs = {wanted: _gradients(backward, gate, case, wanted) for wanted in (("dg", "du"), ("dg",), ("du",))}
    except Exception as error:
        yield f"{type(error).__name__}: {error}".splitlines()[0]
        return
    if not all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip((g, u, dh), before, strict=True)):
        yield "writes into an input"
    if (h.shape, h.dtype) != (g.shape, g.dtype) or not h.is_contiguous():
        yield f"h is {h.dtype} of shape {tuple(h.shape)} and strides {h.stride()}: make it like g, and contiguous"
        return
    yield from _differs("h", h, truth.exact["h"], allowed["h"])
    # A slope at NaN, and 0·∞, are what the kinks of the formula make of them.
    defined = ~(g.isnan() | u.isnan()).cpu()
    known = {n: defined & ~(x.isinf().cpu() & (truth.exact[n] == 0)) for n, x in (("dg", u), ("du", g))}
    for wanted, found in pairs.items():
        for name, into in found.items():
            if name not in wanted:
                if not into.isnan().all():
                    yield f"{name} is written to where it is not wanted"
            else:
                alone = "" if len(wanted) == 2 else " alone"
                yield from _differs(
                    name + alone, into.cpu()[known[name]], truth.exact[name][known[name]], allowed[name]
                )


def _gradients(backward: Backward, gate: Gate, case: _Case, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Return what ``backward`` makes of two poisoned tensors, of which it is handed those wanted."""
    dg, du = _places(case.layout, case.g, torch.nan)
    into = {"dg": dg, "du": du}
    backward(gate, case.g, case.u, case.dh, *(x if n in wanted else None for n, x in into.items()))
    return into


def _reference(gate: Gate, g: Tensor, u: Tensor, dh: Tensor) -> dict[str, Tensor]:
    dg, du = torch.empty(2, *g.shape, dtype=g.dtype)
    with torch.no_grad():
        h = reference.forward(gate, g, u)
    reference.backward(gate, g, u, dh, dg, du)
    return {"h": h, "dg": dg, "du": du}


def _differs(name: str, found: Tensor, exact: Tensor, allowed: _Allowed) -> Iterator[str]:
    info = torch.finfo(found.dtype)
    found = found.cpu().double()
    nan = exact.isnan()
    if not torch.equal(found.isnan() & nan, nan):
        yield f"{name} is a number where the formula has none"
    # Near the largest number it depends on the last digit what overflows.
    infinite, near = exact.isinf(), exact.abs() > info.max / 4
    if not torch.equal(found[infinite], exact[infinite]):
        yield f"{name} is not the infinity of the formula"
    ordinary = ~(nan | infinite | near)
    exact, found = exact[ordinary], found[ordinary]
    if exact.numel() == 0:
        return
    errors = (found - exact).abs()
    limits = torch.full_like(exact, allowed.absolute)
    if allowed.relative is not None:
        limits = (allowed.relative * exact.abs() + 2 * info.tiny).clamp(max=allowed.absolute)
    worst = errors / limits
    if not worst.max().item() <= 1:
        at = int(worst.nan_to_num(torch.inf).argmax())
        yield f"{name} is {found[at]:.6g} and should be {exact[at]:.6g}: {errors[at]:.2g} off, {limits[at]:.2g} allowed"


def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(3)
    for place, layout, shape in _CASES:
        spread, centre = _PLACES[place]
        numbers = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
        # Unlike each other in size and centre: what is swapped must show.
        g, u, dh = numbers[0] * spread + centre, numbers[1] * 1.5 - 0.4, numbers[2] * 0.7 + 0.5
        yield _laid_out(place, layout, *(x.to(device, dtype) for x in (g, u, dh)))
    large = min(1e30, torch.finfo(dtype).max / 16)
    odd = [torch.inf, -torch.inf, torch.nan, large, -large, 0.0, -0.0]
    ordinary = [1.5, -0.5]
    pairs = [(a, b) for a in odd for b in ordinary] + [(b, a) for a in odd[:5] for b in ordinary]
    g, u = torch.tensor(pairs, dtype=torch.float64).to(device, dtype).unbind(1)
    yield _laid_out("infinities, NaN and large numbers", "contiguous", g, u, torch.full_like(g, -0.7))


def _laid_out(place: str, layout: str, g: Tensor, u: Tensor, dh: Tensor) -> _Case:
    if layout == "rows alike":
        return _Case(place, layout, g[:1].expand_as(g), u, dh[:1].expand_as(g))
    if layout == "columns alike":
        return _Case(place, layout, g[:, :1].expand_as(g), u[:1].expand_as(g), dh[:1, :1].expand_as(g))
    places = _places(layout, g, 0.0)
    for where, x in zip(places, (g, u), strict=True):
        where.copy_(x)
    return _Case(place, layout, *places, _places(layout, g, 0.0)[0].copy_(dh))


def _places(layout: str, like: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Return two tensors of one shape and ``layout``, filled."""
    shape, count = tuple(like.shape), like.numel()
    if layout in LAYOUTS:
        return halves(like.new_full((*shape[:-1], 2 * shape[-1]), fill), layout)
    if layout == "transposed":
        first, second = like.new_full((2, *reversed(shape)), fill).unbind()
        return first.permute(*reversed(range(like.dim()))), second.permute(*reversed(range(like.dim())))
    if layout == "shifted":
        whole = like.new_full((2 * count + 1,), fill)
        return whole[1 : count + 1].view(shape), whole[count + 1 :].view(shape)
    first, second = like.new_full((2, *shape), fill).unbind()
    return first, second
