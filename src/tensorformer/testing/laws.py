"""What every activation is held to: one checking function each, for the real ones and for the broken ones alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mpmath
import torch
from torch import Tensor

from tensorformer.gates import Gate, Scalar
from tensorformer.gates.examples import example
from tensorformer.gates.parameters import OPTIONAL
from tensorformer.ops.act_and_mul import fast
from tensorformer.ops.act_and_mul.check import violations
from tensorformer.testing.budgets import slope_budget, value_budget
from tensorformer.testing.inputs import points

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_laws(activation: Scalar | Gate) -> None:
    """Hold an activation to all of the laws; parameters that are not bound are tried at example values.

    Value and derivative against 50 digits of its formula, in four dtypes, in the tails and at ±∞ and NaN; the
    declared limits; gradients, of parameters too; and for a gate every layout of memory, and ``act_and_mul``.

    Raises:
        AssertionError: says which law, at which number.
    """
    for scalar in (activation.gate, activation.value) if isinstance(activation, Gate) else (activation,):
        for bound in _bindings(scalar):
            assert_limits(bound)
            for dtype in DTYPES:
                assert_value(bound, bound, points(dtype))
                for slope in (bound.derivative, slope_of(bound)):
                    assert_slope(slope, bound, points(dtype)[:-1])
    activation = example(activation)
    assert_gradients(activation)
    if isinstance(activation, Gate):
        assert_any_layout(activation)
        for dtype in (torch.float32, torch.bfloat16):
            broken = violations(fast.forward, fast.backward, activation, dtype)
            assert not broken, f"act_and_mul of {activation.name}: {broken[0]}"


def _bindings(scalar: Scalar) -> Iterator[Scalar]:
    """Yield the scalar at example values, at two others, and without the parameter it can do without."""
    free = [n for n in scalar.needs if n not in scalar.parameters]
    bound = example(scalar)
    yield bound
    for factor in (0.6, 1.7) if free else ():
        yield bound.bind(**{n: v * factor for n in free if isinstance(v := bound.parameters[n], float)})
    if scalar.without is not None and free:
        absent = {n: None if "None" in rule else 0.0 for n, rule in scalar.needs.items() if rule in OPTIONAL}
        yield bound.bind(**absent)


def assert_value(f: Callable[[Tensor], Tensor], truth: Scalar, x: Tensor) -> None:
    """Compare ``f(x)`` with 50 digits of ``truth``, each number within its budget; overflow counts as ±∞."""
    exact, slopes = truth.oracle(x), truth.oracle(x, order=1)
    budgets = [value_budget(at, y, s, x.dtype) for at, y, s in zip(x.tolist(), exact, slopes, strict=True)]
    _assert_close(truth.name, x, f(x).detach(), exact, budgets)


def assert_slope(f: Callable[[Tensor], Tensor], truth: Scalar, x: Tensor) -> None:
    """Compare ``f(x)`` with 50 digits of the derivative of ``truth``."""
    exact = truth.oracle(x, order=1)
    _assert_close(f"{truth.name}′", x, f(x).detach(), exact, [slope_budget(y, x.dtype) for y in exact])


def slope_of(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the derivative that autograd finds for ``f``."""

    def slope(x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(x).sum(), x)
        return grad

    return slope


def assert_limits(scalar: Scalar) -> None:
    """Compare the declared limits with 50 digits far out."""
    for side in (-1.0, 1.0):
        limit, near, far = (scalar.oracle(side * x) for x in (torch.inf, 1e150, 1e300))
        if mpmath.isinf(limit):
            good = abs(far) > abs(near) + 1 and mpmath.sign(far) == mpmath.sign(limit)
        else:
            good = abs(far - limit) < mpmath.mpf(10) ** -45
        assert good, f"{scalar.name}: declared limit {mpmath.nstr(limit)}, but {mpmath.nstr(far)} at {side * 1e300}"


def assert_gradients(activation: Scalar | Gate) -> None:
    """Compare first and second derivatives in float64 with finite differences, by the parameters too."""
    x = torch.tensor([-6.2, -3.1, -1.1, -0.6, 0.4, 0.9, 1.9, 5.5, 8.3], dtype=torch.float64)
    inputs = (x, x.roll(4) * 0.9) if isinstance(activation, Gate) else (x,)
    names = [n for n, v in activation.parameters.items() if v is not None]
    values = [torch.as_tensor(activation.parameters[n], dtype=torch.float64) for n in names]

    def f(*arguments: Tensor) -> Tensor:
        bound = activation.bind(**dict(zip(names, arguments[len(inputs) :], strict=True)))
        return bound(*arguments[: len(inputs)])

    leaves = [t.clone().requires_grad_() for t in (*inputs, *values)]
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


def assert_any_layout(gate: Gate) -> None:
    """Compare strided inputs with dense ones at sizes off every block, and see that inputs are left alone."""
    draws = torch.Generator().manual_seed(0)
    for size in (1, 7, 257):
        both = torch.randn(3, size, 2, generator=draws)
        for g, u in (both.unbind(-1), (both[0, :, 0].expand(4, size), both[:1, :, 1].expand(4, size))):
            before = g.clone(), u.clone()
            h = gate(g, u)
            # A vector lane and the odd elements at the end may round differently.
            dense = gate(before[0].contiguous(), before[1].contiguous())
            torch.testing.assert_close(h, dense, rtol=1e-6, atol=1e-37)
            assert torch.equal(g, before[0]), f"{gate.name} wrote into g"
            assert torch.equal(u, before[1]), f"{gate.name} wrote into u"


def _assert_close(name: str, x: Tensor, got: Tensor, exact: list, budgets: list) -> None:
    assert got.dtype == x.dtype, f"{name} returned {got.dtype} for {x.dtype}"
    assert got.shape == x.shape, f"{name} returned {tuple(got.shape)} for {tuple(x.shape)}"
    info = torch.finfo(x.dtype)
    for at, y, true, budget in zip(x.tolist(), got.tolist(), exact, budgets, strict=True):
        if mpmath.isnan(true):
            good = y != y
        elif abs(true) > info.max:
            good = y == (torch.inf if true > 0 else -torch.inf) or (abs(y) == info.max and y * true > 0)
        else:
            good = abs(mpmath.mpf(y) - true) <= budget
        assert good, f"{name}({at!r}) in {x.dtype} is {y!r}, not {mpmath.nstr(true, 12)}"
