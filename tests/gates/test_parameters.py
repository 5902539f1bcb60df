"""Parameters: their names, their values, and formulas that hold without one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tensorformer.errors import GateError
from tensorformer.gates import SCALARS, Scalar


@pytest.mark.parametrize(
    "name", ["x", "g", "dh", "top", "zero", "row", "w0", "t12", "g_row", "lambda", "my value", "exp"]
)
def test_a_name_that_printed_code_uses_is_refused(name: str) -> None:
    with pytest.raises(GateError, match="a parameter can't be called"):
        Scalar("mine", "x", ("-oo", "oo"), "here", {name: "> 0"})


@pytest.mark.parametrize("value", [1e-42, 1e-31, 1e31, 1e39])
def test_a_number_without_room_in_float32_is_refused(value: float) -> None:
    with pytest.raises(GateError, match="leaves no room in float32; write one from 1e-30 to 1e"):
        SCALARS["softcap"].bind(c=value)
    assert SCALARS["softcap"].bind(c=1e-30).parameters["c"] == 1e-30


def test_only_the_optional_parameter_changes_the_formula() -> None:
    mine = Scalar(
        "mine",
        "x*sigmoid(beta*x) + shift",
        ("shift", "oo"),
        "here",
        {"beta": ">= 0", "shift": "any number"},
        without=("x/2 + shift", ("-oo", "oo")),
    )
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(mine.bind(beta=1.0, shift=0.0)(x), x * torch.sigmoid(x))
    torch.testing.assert_close(mine.bind(beta=0.0, shift=3.0)(x), x / 2 + 3)
    with pytest.raises(GateError, match="a formula without a parameter needs one"):
        Scalar("mine", "a*x", ("-oo", "oo"), "here", {"a": "> 0"}, without=("x", ("-oo", "oo")))


def test_inputs_that_do_not_fit() -> None:
    """In a process of its own, where no hook checks annotations first."""
    code = """
import torch
from tensorformer.errors import GateError, ShapeError
from tensorformer.gates import GATES, SCALARS
from tensorformer.ops.act_and_mul import act_and_mul
for call in (
    lambda: SCALARS["silu"](torch.ones(3, dtype=torch.int64)),
    lambda: GATES["swiglu"](torch.ones(4, 1), torch.ones(4, 3)),
    lambda: GATES["bilinear"](torch.ones(3), torch.ones(3).double()),
    lambda: act_and_mul(torch.ones(2, 4), 42, layout="gate_up"),
    lambda: act_and_mul((torch.ones(2), 3.0), "swiglu"),
):
    try:
        call()
    except (GateError, ShapeError) as e:
        print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "silu: x is torch.int64: write .float()",
        "swiglu: g is (4, 1) torch.float32 and u (4, 3) torch.float32: make them alike",
        "bilinear: g is (3,) torch.float32 and u (3,) torch.float64: make them alike",
        "42 is not a gate: write the name of one, such as 'swiglu', or GATES['swiglu']",
        "u is float: write a tensor",
    ], done.stderr


def test_a_range_far_from_zero() -> None:
    low, high = SCALARS["swish"].bind(beta=0.001).image
    assert low == pytest.approx(-278.46454276, rel=1e-9)
    assert high == torch.inf
    hill = Scalar("hill", "x**2*exp(-x**2/20000)", ("0", "0"), "here")
    assert hill.image == (0.0, pytest.approx(20000 / 2.718281828459045, rel=1e-9))
