"""What `study numerics` says a function is: right ones are passed, wrong ones are named, numbers are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar, activation
from tensorformer.gates.examples import example
from tensorformer.study.numerics import numerics
from tensorformer.study.numerics_report import Report
from tensorformer.study.numerics_target import pack

NAMES = [*SCALARS, *GATES]
# The same function under two names; and two that differ by less than 1e-5 of their size.
TWINS = {"situ_value": "softcap", "cap_after_silu": "silu_capped"}


def entry(name: str) -> Scalar | Gate:
    return example(GATES[name]) if name in GATES else example(SCALARS[name])


def study(function: Callable[..., Any], declared: Gate | Scalar | str, layout: str | None = None) -> Report:
    return numerics(function, declared, layout=layout, dtypes=())


def situ(g: Tensor, u: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    return beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)


def clamped(g: Tensor, u: Tensor, limit: float = 7.0) -> Tensor:
    return F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def oai(g: Tensor, u: Tensor, alpha: float = 1.702, limit: float = 7.0, one: float = 1.0) -> Tensor:
    g = g.clamp(max=limit)
    return (u.clamp(-limit, limit) + one) * (g * torch.sigmoid(g * alpha))


SITU = activation("situ", beta=4.0, linear_beta=25.0)
CLAMPED = activation("swiglu_clamped", limit=7.0)
OAI = activation("swiglu_oai", alpha=1.702, limit=7.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_activation_is_itself(name: str) -> None:
    form = entry(name)
    report = study(form, form)
    assert report.definition.fits
    assert report.definition.deviation == 0
    assert report.definition.mistake is None
    assert report.nearest.name == name
    assert report.definition.derivative is not None
    assert report.definition.derivative.fits


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("mish", "fatrelu", "situ_gate", "relu2_glu", "powlu") else pytest.mark.slow)
        for n in NAMES
        if n not in ("identity", "bilinear")
    ],
)
def test_another_is_found_with_its_numbers(name: str) -> None:
    form = entry(name)
    # Not the numbers the search begins with.
    form = form.bind(**{n: float(v) * 1.37 for n, v in form.parameters.items()})  # pyright: ignore[reportArgumentType]
    report = study(lambda *x: form(*x), "bilinear" if isinstance(form, Gate) else "identity")
    assert not report.definition.fits
    assert report.nearest.fits
    assert report.nearest.name in (name, TWINS.get(name))
    if report.nearest.name == name and "threshold" not in form.needs:
        assert report.nearest.parameters == pytest.approx(dict(form.parameters), rel=1e-5)


@pytest.mark.parametrize(
    ("function", "declared", "computes", "deviation", "at"),
    [
        (lambda x: F.gelu(x, approximate="tanh"), "gelu", "gelu_tanh", 4.73e-4, 2.70),
        (lambda x: x * torch.sigmoid(1.702 * x), "gelu", "gelu_quick", 2.03e-2, 2.27),
        (F.gelu, "gelu_tanh", "gelu", 4.73e-4, 2.70),
    ],
)
def test_the_three_gelus_are_told_apart(
    function: Callable[..., Any], declared: str, computes: str, deviation: float, at: float
) -> None:
    report = study(function, declared)
    assert report.verdict.startswith(f"wrong definition: it is not {declared}")
    assert f"it computes {computes}" in report.verdict
    assert report.nearest.name == computes
    assert report.definition.deviation == pytest.approx(deviation, rel=2e-3)
    assert abs(report.definition.at[0]) == pytest.approx(at, abs=0.02)


MISTAKES: list[tuple[Callable[..., Any], Gate | Scalar | str, str | None, str]] = [
    # Constants.
    (lambda x: 0.5 * x * (1 + torch.erf(1.002 * x / 2**0.5)), "gelu", None, "the argument of Phi is 1.002 times x"),
    (
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.0447 * x**3))),
        "gelu_tanh",
        None,
        "0.044715 is 0.0447 there",
    ),
    (lambda x: 1.1 * F.silu(x), "silu", None, "the result is 1.1 times what it should be"),
    (lambda x: F.silu(x).clamp(-5, 5), "silu", None, "the result is clamped to ±5"),
    # The layout.
    (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], "swiglu", "up_gate", "gate and up are swapped"),
    (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], "swiglu", "interleaved", "the input is read as gate_up"),
    (lambda x: F.silu(x[..., ::2]) * x[..., 1::2], "swiglu", "gate_up", "the input is read as interleaved"),
    (lambda x: F.silu(x[..., 1::2]) * x[..., ::2], "swiglu", "gate_up", "read as interleaved, up first"),
    (lambda x: F.silu(x[..., 1::2]) * x[..., ::2], "swiglu", "interleaved", "gate and up are swapped"),
    (lambda g, u: g * F.silu(u), "swiglu", None, "gate and up are swapped"),
    # Clamps.
    (lambda g, u: F.silu(g) * u, CLAMPED, None, "so it is swiglu"),
    (lambda g, u: F.silu(g) * u.clamp(-7, 7), CLAMPED, None, "the clamp cap(x, limit) is missing (of the gate branch)"),
    (
        lambda g, u: F.silu(g.clamp(max=7)) * u.clamp(max=7),
        CLAMPED,
        None,
        "of the clamp clip(x, -limit, limit) only the upper side is there",
    ),
    (lambda g, u: F.silu(g.clamp(-7, 7)) * u.clamp(-7, 7), CLAMPED, None, "cap(x, limit) clamps below as well"),
    (lambda g, u: F.silu(g).clamp(max=7) * u.clamp(-7, 7), CLAMPED, None, "it clamps after and not before"),
    (clamped, activation("swiglu_clamp_after", limit=7.0), None, "it clamps before and not after"),
    # Parameters.
    (lambda g, u: clamped(g, u, 10.0), CLAMPED, None, "limit is 10, not 7"),
    (lambda g, u: oai(g, u, one=0.0), OAI, None, "the + 1 is missing"),
    (lambda g, u: oai(g, u, alpha=1.0), OAI, None, "alpha is 1, not 1.702"),
    (lambda g, u: oai(g, u, alpha=1.0, limit=10.0), OAI, None, "alpha is 1, not 1.702 and limit is 10, not 7"),
    (lambda g, u: oai(g, u, one=0.0, limit=10.0), OAI, None, "+ 1 is missing (of the up branch); limit is 10, not 7"),
    (lambda g, u: situ(g, u, beta=4.04), SITU, None, "beta is 4.04, not 4"),
    (lambda g, u: situ(g, u, linear_beta=4.0), SITU, None, "linear_beta is 4, not 25"),
    (lambda g, u: 4 * torch.tanh(g / 4) * torch.sigmoid(g) * u, SITU, None, "tanh(x/linear_beta) is missing"),
    (lambda x: oai(x[..., ::2], x[..., 1::2], limit=10.0), OAI, "gate_up", "as interleaved; limit is 10, not 7"),
]


@pytest.mark.parametrize(
    ("function", "declared", "layout", "words"),
    [
        # Two mistakes at once: every one must be tried with every number.
        pytest.param(*m, id=m[3][:40], marks=pytest.mark.slow if "); limit" in m[3] else [])
        for m in MISTAKES
    ],
)
def test_mistakes_are_named(
    function: Callable[..., Any], declared: Gate | Scalar | str, layout: str | None, words: str
) -> None:
    report = study(function, declared, layout)
    assert not report.definition.fits
    assert report.verdict.startswith("wrong definition: ")
    assert words in report.verdict
    assert report.definition.deviation > 5e-6
    # The mistake is that of the value alone: autograd's gradient is that of the function as it is.
    assert report.definition.derivative is not None
    assert report.definition.derivative.fits


@pytest.mark.slow
@given(beta=st.floats(0.5, 12.0), linear_beta=st.floats(2.0, 40.0), layout=st.sampled_from([None, "interleaved"]))
@settings(max_examples=10)
def test_whatever_the_numbers_they_are_found(beta: float, linear_beta: float, layout: str | None) -> None:
    def function(*x: Tensor) -> Tensor:
        g, u = x if layout is None else (x[0][..., ::2], x[0][..., 1::2])
        return situ(g, u, beta, linear_beta)

    report = study(function, SITU, layout)
    if report.definition.fits:
        assert (beta, linear_beta) == pytest.approx((4, 25), rel=1e-3)
    else:
        assert report.nearest.name == "situ"
        assert report.nearest.parameters == pytest.approx({"beta": beta, "linear_beta": linear_beta}, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid", "swiglu", "swiglu_oai", "relu2_glu"])
def test_rounding_inside_is_no_wrong_definition(name: str, dtype: torch.dtype) -> None:
    form = entry(name)
    report = study(lambda *x: form(*(a.to(dtype) for a in x)).to(x[0].dtype), form)
    assert report.definition.fits
    assert report.definition.derivative is not None
    assert report.definition.derivative.fits


def test_half_a_sigmoid_in_float16_is_no_wrong_definition() -> None:
    """Near 1 its rounding is all one way, which looks like a definition."""
    assert study(lambda x: torch.sigmoid(x).half().to(x.dtype) * x, "silu").definition.fits


class WrongBackward(torch.autograd.Function):
    """SiLU with the gradient of something else."""

    slope: Callable[[Tensor], Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * WrongBackward.slope(ctx.saved_tensors[0])


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (lambda x: 1.01 * SCALARS["silu"].derivative(x), "it is 1.01 times what it should be"),
        (lambda x: SCALARS["gelu"].derivative(x), "it is that of gelu"),
        (torch.zeros_like, "it is zero everywhere"),
        (lambda x: SCALARS["silu"].derivative(x) + 0.01 * torch.sin(x), "no known mistake explains it"),
    ],
)
def test_a_wrong_derivative_is_named(slope: Callable[[Tensor], Tensor], words: str) -> None:
    WrongBackward.slope = staticmethod(slope)
    for declared, function in (("silu", WrongBackward.apply), ("swiglu", lambda g, u: WrongBackward.apply(g) * u)):
        report = study(function, declared)
        assert report.definition.fits
        derivative = report.definition.derivative
        assert derivative is not None
        assert not derivative.fits
        assert derivative.by == ("x" if declared == "silu" else "g")
        assert report.verdict.startswith(f"wrong derivative: its derivative by {derivative.by} is wrong")
        if declared == "silu" or "gelu" not in words:
            assert words in report.verdict


def test_a_derivative_that_ignores_a_clamp_is_named() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, u: Tensor) -> Tensor:
            return u.clamp(-7, 7)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    report = study(lambda g, u: F.silu(g.clamp(max=7)) * Through.apply(u), CLAMPED)
    assert "wrong derivative: its derivative by u" in report.verdict
    assert "the clamp clip(x, -limit, limit) is missing" in report.verdict


def test_without_a_gradient_there_is_nothing_to_judge() -> None:
    report = study(lambda x: F.silu(x.detach()), "silu")
    assert report.definition.fits
    assert report.definition.derivative is None


def test_what_no_mistake_explains_is_said_to_be_so() -> None:
    report = study(lambda g, u: torch.sin(g) * u, "swiglu")
    assert "no known mistake explains it; nearest is " in report.verdict
    assert not report.nearest.fits
    assert report.definition.derivative is None


def test_a_small_smooth_error_is_left_in_doubt() -> None:
    report = study(lambda x: F.silu(x) * (1 + 2e-4 * torch.sin(x)), "silu")
    assert report.definition.rough
    assert report.verdict.startswith("definition in doubt: it is roughly silu")


def test_a_function_that_is_nan_everywhere_fits_nothing() -> None:
    report = study(lambda x: x * torch.nan, "silu")
    assert not report.definition.fits
    assert not report.nearest.fits


def test_one_that_writes_into_its_input_is_judged_by_its_output() -> None:
    assert study(lambda x: F.silu(x, inplace=True), "silu").definition.fits


def test_packing_is_what_the_layouts_say() -> None:
    g, u = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    assert pack(g, u, "gate_up").tolist() == [[1, 2, 3, 4]]
    assert pack(g, u, "up_gate").tolist() == [[3, 4, 1, 2]]
    assert pack(g, u, "interleaved").tolist() == [[1, 3, 2, 4]]


def test_a_turned_sign_is_named() -> None:
    report = numerics(lambda g, u: -F.silu(g) * u, "swiglu")
    assert "sign is turned" in report.verdict


def test_a_function_that_does_not_repeat_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="another result for the same input"):
        numerics(lambda x: F.silu(x) * (1 + 1e-3 * torch.randn_like(x)), "silu")
