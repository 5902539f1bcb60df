"""What grouped experts refuse: operands that do not fit together. Shapes and dtypes only, never values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, ShapeError, suggest
from tensorformer.gates.parameters import fits
from tensorformer.ops.autocast import autocast_dtype
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.operands import check_float

IMPLS = ("auto", "reference", "fast", "native", "triton")


class Operands(NamedTuple):
    """What is differentiated: tokens, weights of the experts, of the routing, and biases where there are any."""

    x: Tensor  # (N, d)
    gate_up: Tensor  # (E, d, 2·d_ff), of a scalar (E, d, d_ff)
    down: Tensor  # (E, d_ff, d)
    weights: Tensor  # (N, k)
    gate_up_bias: Tensor | None  # (E, 2·d_ff), of a scalar (E, d_ff)
    down_bias: Tensor | None  # (E, d)

    @property
    def wide(self) -> torch.dtype:
        """What is summed over experts in: float32 or better."""
        return torch.promote_types(self.x.dtype, torch.float32)

    def given(self) -> list[Tensor]:
        """Return those that are there."""
        return [t for t in self if t is not None]


def check_impl(impl: str) -> None:
    """Raise ConfigError for an implementation there isn't."""
    if impl not in IMPLS:
        raise ConfigError(f"no impl {impl!r} of grouped_experts{suggest(str(impl), IMPLS)}")


def check_operands(operands: Operands, indices: Tensor, activation: Activation) -> None:
    """Raise ShapeError where shapes, dtypes or devices do not fit together."""
    x, gate_up, down, weights, *_ = operands
    named = {n: t for n, t in operands._asdict().items() if t is not None}
    for name, t in named.items():
        check_float(name, t)
        if t.device != x.device:
            raise ShapeError(f"{name} is on {t.device} and x on {x.device}: move one of them")
    if x.dim() != 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}: write (tokens, d), such as x.flatten(0, -2)")
    if gate_up.dim() != 3 or down.dim() != 3:
        raise ShapeError(
            f"gate_up has shape {tuple(gate_up.shape)} and down {tuple(down.shape)}: stack the experts' weights as"
            " (E, d, 2·d_ff) and (E, d_ff, d)"
        )
    d, (experts, d_ff, _) = x.shape[1], down.shape
    if experts == 0:
        raise ShapeError("gate_up and down hold no experts: there must be one at least")
    columns = activation.projections * d_ff
    _expect("gate_up", gate_up, (experts, d, columns), activation)
    _expect("down", down, (experts, d_ff, d), activation)
    for name, width in (("gate_up_bias", columns), ("down_bias", d)):
        if name in named:
            _expect(name, named[name], (experts, width), activation)
    _check_routing(x, weights, indices)
    for name, value in activation.tensors.items():
        if not fits(value.shape, (experts, 1, d_ff)):
            raise ShapeError(
                f"{activation.gate.name}: {name} of shape {tuple(value.shape)} does not fit {(experts, 1, d_ff)},"
                " one number, one a channel, or one a channel of each expert"
            )
        if value.device != x.device and value.dim():
            raise ShapeError(f"{activation.gate.name}: {name} is on {value.device} and x on {x.device}: move one")


def in_one_dtype(operands: Operands) -> Operands:
    """Return the operands in the dtype of autocast, or of x, which all but the routing weights must share.

    Raises:
        ShapeError: their dtypes differ, outside of autocast.
    """
    x = operands.x
    kept = {n: t for n, t in operands._asdict().items() if t is not None and n != "weights"}
    asked = autocast_dtype(x.device)
    if asked is not None and all(t.dtype != torch.float64 for t in kept.values()):
        return operands._replace(**{n: t.to(asked) for n, t in kept.items()})
    for name, t in kept.items():
        if t.dtype != x.dtype:
            raise ShapeError(f"x is {x.dtype} and {name} {t.dtype}: write .to() for one dtype")
    return operands


def check_indices(indices: Tensor, experts: int) -> None:
    """Refuse indices that name no expert: a token sent there would be lost.

    This reads values: an implementation calls it where it reads them anyway.

    Raises:
        ShapeError: one is negative, or too large.
    """
    if indices.numel():
        low, high = (int(i) for i in indices.aminmax())
        if low < 0 or high >= experts:
            raise ShapeError(f"indices goes from {low} to {high}: write 0 to {experts - 1}, one of {experts} experts")


def _check_routing(x: Tensor, weights: Tensor, indices: Tensor) -> None:
    if weights.dim() != 2 or len(weights) != len(x):
        raise ShapeError(f"weights has shape {tuple(weights.shape)}: write (tokens, k), here ({len(x)}, k)")
    if indices.shape != weights.shape:
        raise ShapeError(
            f"indices has shape {tuple(indices.shape)} and weights {tuple(weights.shape)}: write (tokens, k) for both"
        )
    if indices.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"indices is {indices.dtype}: write .long(); it says which experts each token goes to")
    if indices.device != x.device:
        raise ShapeError(f"indices is on {indices.device} and x on {x.device}: move one of them")


def _expect(name: str, t: Tensor, shape: tuple[int, ...], activation: Activation) -> None:
    if tuple(t.shape) != shape:
        kind = "a gate" if activation.projections == 2 else "a function of one variable"
        raise ShapeError(
            f"{name} has shape {tuple(t.shape)}: with {activation.gate.name!r}, {kind}, x and down make it {shape}"
        )
