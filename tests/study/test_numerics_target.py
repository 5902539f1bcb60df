"""How `study numerics` finds an implementation by name, and what it says when it can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorformer.errors import ConfigError, GateError, TensorformerError
from tensorformer.gates import SCALARS, activation
from tensorformer.study.numerics import numerics
from tensorformer.study.numerics_target import Target, load

SILU, SWIGLU = activation("silu"), activation("swiglu")


class Method:
    def act(self, x: Tensor) -> Tensor:
        return x


def no_tensor(x: Tensor) -> Any:
    return x.tolist()


@pytest.mark.parametrize(
    "name", ["torch.nn.functional:silu", "torch.nn:SiLU", "torch:nn.functional.silu", "tensorformer.gates:SCALARS.silu"]
)
def test_names_lead_to_functions_classes_attributes_and_keys(name: str) -> None:
    x = torch.tensor([-1.0, 2.0])
    torch.testing.assert_close(load(name, SILU, None)(x), F.silu(x))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fastt", "write module:function, such as torch.nn.functional:silu, or one of reference, fast, native, triton"),
        ("torch.nn.functional:", "write module:function"),
        ("no_such_module:silu", "there is no module 'no_such_module' here"),
        ("torch.nn.functional:sillu", "there is no 'sillu' in it; did you mean 'silu'"),
        ("tensorformer.gates:SCALARS.sillu", "did you mean 'silu'"),
        ("torch:__version__", "can't be called"),
        ("torch.nn:Linear", "is a class that takes arguments"),
        ("fast", "'fast' computes gates, and 'silu' is a scalar"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as e:
        numerics(name, SILU)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "numerics_mine.py").write_text("import torch\ndef act(x):\n    return x * torch.sigmoid(x)\n")
    (tmp_path / "numerics_broken.py").write_text("1 / 0\n")
    assert numerics("numerics_mine:act", SILU, dtypes=()).definition.fits
    with pytest.raises(ConfigError, match="importing numerics_broken fails: ZeroDivisionError: division by zero"):
        numerics("numerics_broken:act", SILU)


@pytest.mark.parametrize(
    ("function", "declared", "layout", "words"),
    [
        (F.relu6, SWIGLU, None, "say in which layout: gate_up, up_gate, interleaved"),
        (lambda x: x, SWIGLU, None, "is called with g and u, and that does not fit it"),
        (lambda g, u: g * u, SWIGLU, "gate_up", "without a layout it is called with g and u"),
        (F.silu, SWIGLU, "gate_up", "returns shape (380, 66) for (380, 66), where (380, 33) is due"),
        (lambda g, u: g * u, SILU, None, "is called with x"),
        (Method.act, SILU, None, "is a method; name a function that calls it on an object"),
        (no_tensor, SILU, None, "returns list, not a floating tensor"),
        (lambda x: x > 0, SILU, None, "returns torch.bool, not a floating tensor"),
        (lambda x: x.sum(), SILU, None, "returns shape ()"),
        (lambda x: x.no_such_thing, SILU, None, "fails on float32 of shape (180, 33): AttributeError"),
        (torch.argsort, SILU, None, "returns torch.int64"),
    ],
)
def test_a_function_that_does_not_fit_is_one_line(function: Any, declared: Any, layout: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as e:
        numerics(function, declared, layout=layout)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gate": "swigluu"}, "did you mean 'swiglu'"),
        ({"gate": "situ"}, "needs beta"),
        ({"gate": SCALARS["swish"]}, "needs beta"),
        ({"gate": "swiglu", "layout": "gateup"}, "unknown layout 'gateup'; did you mean 'gate_up'"),
        ({"gate": "silu", "layout": "gate_up"}, "'silu' has one input"),
        ({"gate": "silu", "dtypes": [torch.float64]}, "torch.float64 is not one of float32, bfloat16, float16"),
        ({"gate": SCALARS["swish"].bind(beta=torch.ones(3))}, "bind a plain number"),
    ],
)
def test_a_declaration_that_is_wrong_says_what_to_write(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TensorformerError) as e:
        numerics(F.silu, **arguments)
    assert words in str(e.value)


def test_a_parameter_may_be_a_tensor_of_one_number() -> None:
    form = SCALARS["swish"].bind(beta=torch.tensor(1.702))
    assert numerics(lambda x: x * torch.sigmoid(torch.tensor(1.702) * x), form, dtypes=()).definition.fits


def test_a_function_never_gets_the_same_tensor_twice() -> None:
    x = torch.ones(2, 33, dtype=torch.float64)
    Target(lambda a: a.zero_(), "zero", 1, None)((x,))
    assert x.all()


def test_errors_of_our_own_pass_as_they_are() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise GateError("write something else")

    with pytest.raises(GateError, match=r"^write something else$"):
        numerics(refuses, SILU)
