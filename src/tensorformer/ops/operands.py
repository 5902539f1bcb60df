"""What operators with a gate take: a gate or its name, and its two projections, apart or in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, GateError, ShapeError, suggest
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.gates.parameters import fits

Operand = Tensor | tuple[Tensor, Tensor]
Activation = Gate | Scalar | str  # a scalar is refused, but it is what `activation` may return

#: Where the two projections lie in one tensor; of a checkpoint, and never guessed.
LAYOUTS: dict[str, str] = {
    "gate_up": "the gate in the first half, up in the second (transformers, vLLM)",
    "up_gate": "up in the first half, the gate in the second (torch's F.glu, ScatterMoE)",
    "interleaved": "the gate at even places, up at odd ones (gpt-oss)",
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bound(gate: Activation) -> Gate:
    """Return a gate ready to use, by itself or by its name.

    Raises:
        GateError: there is no such gate, it is a function of one variable, or a parameter is missing.
    """
    if isinstance(gate, str):
        gate = SCALARS[gate] if gate in SCALARS and gate not in GATES else GATES[gate]
    if isinstance(gate, Scalar):
        _refuse(gate)
    if not isinstance(gate, Gate):
        raise GateError(f"{gate!r} is not a gate: write the name of one, such as 'swiglu', or GATES['swiglu']")
    if gate.gate.needs and gate.value.needs:
        _check_shared(gate)
    if (gate.gate.needs or gate.value.needs) and len(gate.parameters) < len(gate.needs):
        return gate.bind()  # raises, and says what to write
    return gate


def tensor_parameters(gate: Gate) -> dict[str, Tensor]:
    """Return the parameters that are tensors, by name."""
    if not (gate.gate.parameters or gate.value.parameters):  # a small layer notices every dictionary
        return {}
    return {n: v for n, v in gate.parameters.items() if isinstance(v, Tensor)}


def check_parameters(gate: Gate, shape: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the tensor parameters; refuse one that does not broadcast to g and u, or lies on another device."""
    tensors = tensor_parameters(gate)
    for name, value in tensors.items():
        if not fits(value.shape, shape):
            raise ShapeError(f"{gate.name}: {name} of shape {tuple(value.shape)} does not fit {tuple(shape)}")
        if value.device != device and value.dim():
            raise ShapeError(f"{gate.name}: {name} is on {value.device} and its input on {device}: move one of them")
    return tensors


def split(x: Operand, layout: str | None) -> tuple[Tensor, Tensor]:
    """Return the gate projection g and the up projection u as views of ``x``, having checked it.

    Args:
        x: (..., 2·d_ff) with a layout, or a pair (g, u) of (..., d_ff) without one; any strides.
        layout: a key of ``LAYOUTS``.

    Returns:
        g and u, each (..., d_ff), in that order whatever the layout.

    Raises:
        ConfigError: the layout is unknown, missing, or given with a pair.
        ShapeError: the last axis is odd or absent, a pair does not match, or a tensor is not floating.
    """
    check(x, layout)
    return halves(x, str(layout)) if isinstance(x, Tensor) else x


def check(x: Operand, layout: str | None) -> Sequence[int]:
    """Return the shape of g and u, or raise as ``split`` does.

    Shapes and dtypes are checked, never values: that would wait for the device and break a compiled graph.
    """
    if isinstance(x, Tensor):
        _check_whole(x, layout)
        return (*x.shape[:-1], x.shape[-1] // 2)
    if layout is not None:
        raise ConfigError(f"layout={layout!r} with a pair (g, u): a pair is split already; leave layout out")
    if len(x) != 2:
        raise ShapeError(f"x is a tuple of {len(x)}: write a pair (g, u), or one tensor with a layout")
    g, u = x
    check_float("g", g)
    check_float("u", u)
    if g.shape != u.shape or g.dtype != u.dtype or g.device != u.device:
        raise ShapeError(f"g is {_described(g)} and u {_described(u)}: they need one shape, dtype and device")
    return g.shape


def halves(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return g and u, views of ``x`` (..., 2·d_ff), unchecked; of an empty dx these are the places of dg and du."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    width = x.shape[-1] // 2
    first, second = x[..., :width], x[..., width:]
    return (first, second) if layout == "gate_up" else (second, first)


def check_float(name: str, x: Tensor) -> None:
    """Refuse what is no tensor, is not floating, or has no axis."""
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name} is {type(x).__name__}: write a tensor")
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name} is {x.dtype}: write .float(), or another of float64, float32, bfloat16, float16")
    if x.dim() == 0:
        raise ShapeError(f"{name} is a single number: write it with an axis of features, (..., d_ff)")


def _check_whole(x: Tensor, layout: str | None) -> None:
    if layout is None:
        known = ", ".join(f'"{name}"' for name in LAYOUTS)
        raise ConfigError(f"one tensor holds gate and up, and layout is not given: write one of {known}, or a pair")
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}{suggest(str(layout), LAYOUTS)}")
    check_float("x", x)
    if x.shape[-1] % 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}: its last axis holds gate and up, and {x.shape[-1]} is odd")


def _check_shared(gate: Gate) -> None:
    """Refuse two halves that were bound apart to different values of one name: a kernel has one variable for it."""
    first, second = gate.gate.parameters, gate.value.parameters
    for name in first.keys() & second.keys():
        if first[name] is not second[name] and not _equal(first[name], second[name]):
            raise GateError(
                f"{gate.name}: {name} is {first[name]!r} in one half and {second[name]!r} in the other;"
                f" bind the gate, .bind({name}=…), or give them two names"
            )


def _equal(a: object, b: object) -> bool:
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def _refuse(scalar: Scalar) -> NoReturn:
    gates = [repr(n) for n, gate in GATES.items() if gate.gate.name == scalar.name]
    hint = f"write a gate with it, {' or '.join(gates)}, or" if gates else "write a gate, or"
    raise GateError(f"{scalar.name!r} is a function of one variable, not a gate: {hint} SCALARS[{scalar.name!r}](x)")


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
