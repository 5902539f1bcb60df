"""Bad input: an error of the right kind, in one line, that says what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tensorformer.errors import ConfigError, GateError, ShapeError
from tensorformer.gates import GATES, SCALARS
from tensorformer.ops.act_quant import FORMATS, act_quant, dequantise, quantise, resolve
from tensorformer.ops.operands import check

X = torch.randn(4, 12)
GIVEN: dict[str, Any] = {"x": X, "gate": "swiglu", "format": "int8", "layout": "gate_up"}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"x": X[:, :11]}, ShapeError, "11 is odd"),
        ({"x": X.int()}, ShapeError, r"x is torch.int32: write .float\(\)"),
        ({"x": X.to(torch.float8_e5m2)}, ShapeError, "x is torch.float8_e5m2"),
        ({"x": torch.tensor(1.0)}, ShapeError, "axis of features"),
        ({"layout": "gate-up"}, ConfigError, "did you mean 'gate_up'"),
        ({"layout": None}, ConfigError, 'write one of "gate_up", "up_gate", "interleaved", or a pair'),
        ({"x": (X, X)}, ConfigError, "leave layout out"),
        ({"x": (X, X[:, 1:]), "layout": None}, ShapeError, r"g is \(4, 12\).*u \(4, 11\)"),
        ({"x": (X, X.double()), "layout": None}, ShapeError, "torch.float64"),
        ({"x": (X.int(), X.int()), "layout": None}, ShapeError, "g is torch.int32"),
        ({"gate": "swiglo"}, GateError, "did you mean 'swiglu'"),
        ({"gate": "silu"}, GateError, "write a gate with it, 'swiglu', or SCALARS"),
        ({"gate": SCALARS["relu"]}, GateError, "write a gate with it, 'reglu' or 'drelu', or"),
        ({"gate": "softcap"}, GateError, "write a gate, or SCALARS"),
        ({"gate": "situ"}, GateError, "beta"),
        ({"gate": GATES["situ"]}, GateError, "beta"),
        ({"format": "int4"}, ConfigError, "did you mean 'int8'"),
        ({"group": 0}, ConfigError, "group=0: write how many neighbours"),
        ({"group": True}, ConfigError, "group=True.*or None for the whole token"),
        ({"format": "mxfp8", "group": 16}, ConfigError, "mxfp8 has groups of 32; leave group out"),
        ({"format": "nvfp4", "group": 32}, ConfigError, "nvfp4 has groups of 16"),
        ({"weight": torch.rand(5)}, ShapeError, r"one number a token, \(4,\)"),
        ({"weight": torch.rand(4, 6)}, ShapeError, r"weight has shape \(4, 6\)"),
        ({"weight": torch.ones(4, dtype=torch.int64)}, ShapeError, "weight is torch.int64"),
        ({"tensor_scale": 2.0}, ConfigError, "leave it out for int8"),
        ({"format": "nvfp4", "tensor_scale": 0.0}, ConfigError, "finite number > 0"),
        ({"format": "nvfp4", "tensor_scale": torch.ones(4)}, ConfigError, "write one float"),
        ({"impl": "fats"}, ConfigError, "did you mean 'fast'"),
        ({"impl": "triton"}, ConfigError, 'impl "triton" of act_quant needs'),
    ],
)
@pytest.mark.parametrize("function", [act_quant, resolve])
def test_refused(function: Any, change: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        # The test hook checks types too: this is about what a caller without it reads.
        inspect.unwrap(function)(**{**GIVEN, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: quantise(X.int(), "int8"), ShapeError, r"h is \(4, 12\) torch.int32"),
        (lambda: quantise(torch.tensor(1.0), "int8"), ShapeError, r"\(..., width\)"),
        (lambda: quantise(X, "nvfp"), ConfigError, "did you mean 'nvfp4'"),
        (lambda: dequantise(*quantise(X, "int8"), "fp8_e4m3"), ShapeError, "codes is torch.int8: fp8_e4m3 has"),
        (lambda: dequantise(*quantise(X, "fp8_e4m3"), "mxfp8"), ShapeError, "scale is torch.float32: mxfp8 has"),
        (lambda: dequantise(*quantise(X, "int8"), "int8", 4), ShapeError, r"groups of 4 in 12 make \(4, 3\)"),
        (lambda: dequantise(*quantise(X[:, :11], "nvfp4"), "nvfp4", width=13), ShapeError, "width=13 does not fit"),
        (lambda: dequantise(*quantise(X, "int8"), "int8", width=11), ShapeError, "width=11 does not fit"),
    ],
)
def test_casts_refuse(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_formats_say_what_they_are() -> None:
    assert list(FORMATS) == ["int8", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4"]
    with pytest.raises(TypeError):
        FORMATS["int4"] = FORMATS["int8"]  # pyright: ignore[reportIndexIssue]
    for name, spec in FORMATS.items():
        assert spec.name == name
        assert spec.description
        assert spec.source
        if spec.codes.is_floating_point:
            assert spec.max == torch.finfo(spec.codes).max


def test_a_pair_is_two() -> None:
    with pytest.raises(ShapeError, match="tuple of 3: write a pair"):
        inspect.unwrap(check)((X, X, X), None)
