"""Activations with example parameters, and a comparison with 50 digits at a tolerance of one's own."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import torch
from torch import Tensor

from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.examples import EXAMPLES, example

NUMBERS = EXAMPLES
SCALAR_NAMES, GATE_NAMES = sorted(SCALARS), sorted(GATES)
INF = float("inf")


def scalar(name: str) -> Scalar:
    """Return the scalar ``name`` with the parameters of the models that use it."""
    return example(SCALARS[name])


def gate(name: str) -> Gate:
    """Return the gate ``name`` with the parameters of the models that use it."""
    return example(GATES[name])


def assert_matches_oracle(
    f: Callable[[Tensor], Tensor], truth: Scalar, x: Tensor, *, order: int = 0, rtol: float, atol: float = 0.0
) -> None:
    """Compare ``f(x)`` with 50 digits of ``truth``, each number at its own size; overflow counts as ±∞.

    Args:
        f: the implementation, or its derivative.
        truth: the scalar whose formula decides.
        x: the points, in the dtype under test.
        order: 0 for the function, 1 for its derivative.
        rtol: of the true value. atol: besides; the dtype's smallest normal number is always allowed.
    """
    y = f(x).detach()
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    info = torch.finfo(x.dtype)
    for at, got, exact in zip(x.flatten().tolist(), y.flatten().tolist(), truth.oracle(x, order=order), strict=True):
        if mpmath.isnan(exact):
            assert got != got, f"{truth.name} at NaN gives {got}"
            continue
        if abs(exact) > info.max:
            assert got == (INF if exact > 0 else -INF) or abs(got) > 0.99 * info.max, f"{truth.name}({at}) = {got}"
            continue
        error = abs(mpmath.mpf(got) - exact)
        allowed = rtol * abs(exact) + atol + info.smallest_normal
        assert error <= allowed, (
            f"{truth.name}, order {order}, at {at!r}: {got!r} for {mpmath.nstr(exact, 12)}, "
            f"{mpmath.nstr(error / abs(exact) if exact else error, 3)} off (allowed {mpmath.nstr(allowed, 3)})"
        )
