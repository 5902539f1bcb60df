"""Measuring one feed-forward layer: what goes through its gate, and what other gates would make of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorformer.config.activations import Activation, is_gated
from tensorformer.gates import Gate, Scalar
from tensorformer.gates.parameters import described
from tensorformer.study.ranges_formats import FormatEffects
from tensorformer.study.ranges_limits import SaturationCount, bound
from tensorformer.study.ranges_result import Dead, Layer, Product
from tensorformer.study.ranges_stream import Stream

FAINT = 0.01  # of the layer's rms of φ
Rows = Float[Tensor, "tokens d_ff"]


class LayerMeter:
    """All that is measured of one layer, over tokens that come in batches.

    Args:
        name: of the layer.
        activation: its own. Of one that couples a whole row, only what goes in and out is measured.
        down: its down projection.
        instead: other gates to give the same inputs, if it has a gate projection.
    """

    def __init__(self, name: str, activation: Activation, down: nn.Linear, instead: Sequence[Gate] = ()) -> None:
        self._name, self._activation = name, activation
        self._inside = {key: Stream() for key in _inside(activation)}
        self._units = _Units(down.in_features)
        self._own = _ProductMeter(activation, down)
        others = [g for g in instead if is_gated(activation) and _described(g) != _described(activation)]
        self._instead = [(g, _ProductMeter(g, down)) for g in others]

    @torch.no_grad()
    def update(self, g: Rows | None, u: Rows, h: Rows) -> None:
        """Measure some tokens.

        Args:
            g: the gate projection, if there is one.
            u: the up projection.
            h: what goes into the down projection.
        """
        with torch.autocast(h.device.type, enabled=False):
            self._update(g, u, h)

    def _update(self, g: Rows | None, u: Rows, h: Rows) -> None:
        # With two matrices φ is the product; where a row is coupled, the product stands for it.
        phi, values = h, {"gate": g, "up": u}
        if isinstance(self._activation, Gate):
            assert g is not None
            phi = self._activation.gate(g)
            values |= {"phi": phi, "psi": self._activation.value(u)}
        for key, stream in self._inside.items():
            if (value := values[key]) is not None:
                stream.update(value)
        self._units.update(phi, h)
        self._own.update(g, u, h)
        for gate, meter in self._instead:
            assert g is not None
            meter.update(g, u, gate(g, u))

    def result(self) -> Layer:
        """Return what was measured."""
        inside, own = {key: stream.summary() for key, stream in self._inside.items()}, self._own.result()
        phi = inside.get("phi", inside["gate"]) if isinstance(self._activation, Gate) else own.product
        dead = self._units.result(phi.rms or 0.0)
        return Layer(self._name, inside, own, dead, [meter.result() for _, meter in self._instead])


class _ProductMeter:
    """The product of one gate: its distribution, its saturation, and what formats do to it."""

    def __init__(self, activation: Activation, down: nn.Linear) -> None:
        self._activation = activation
        self._product, self._effects = Stream(), FormatEffects(down)
        self._saturation = {key: SaturationCount(half) for key, half in _halves(activation).items()}

    def update(self, g: Rows | None, u: Rows, h: Rows) -> None:
        inputs = {"phi": u if g is None else g, "psi": u}
        for key, count in self._saturation.items():
            count.update(inputs[key])
        self._product.update(h)
        self._effects.update(h)

    def result(self) -> Product:
        return Product(
            gate=_described(self._activation),
            bound=bound(self._activation) if isinstance(self._activation, Gate | Scalar) else None,
            product=self._product.summary(),
            saturation={
                f"{key} {side}": found
                for key, count in self._saturation.items()
                for side, found in count.result().items()
            },
            output=self._effects.output,
            effects=self._effects.results(),
        )


class _Units:
    """The largest |φ| and |h| of every unit; NaN counts as alive."""

    def __init__(self, d_ff: int) -> None:
        self._phi, self._product = torch.zeros(d_ff), torch.zeros(d_ff)

    def update(self, phi: Rows, h: Rows) -> None:
        if len(h):
            self._phi = torch.maximum(self._phi, _largest(phi))
            self._product = torch.maximum(self._product, _largest(h))

    def result(self, rms: float) -> Dead:
        zero = self._product == 0
        return Dead(len(zero), int(zero.sum()), int(((self._phi < FAINT * rms) & ~zero).sum()))


def _largest(x: Rows) -> Float[Tensor, " d_ff"]:
    return x.abs().amax(0).float().nan_to_num(nan=torch.inf, posinf=torch.inf).cpu()


def _inside(activation: Activation) -> list[str]:
    """Return which quantities a layer has besides its product; an identity is not listed twice."""
    projections = ["gate", "up"] if is_gated(activation) else ["up"]
    if not isinstance(activation, Gate):
        return projections
    return projections + [key for key, half in _halves(activation).items() if half.name != "identity"]


def _halves(activation: Activation) -> dict[str, Scalar]:
    if isinstance(activation, Gate):
        return {"phi": activation.gate, "psi": activation.value}
    return {"phi": activation} if isinstance(activation, Scalar) else {}


def _described(activation: Activation) -> str:
    values = {n: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for n, v in activation.parameters.items()}
    return described(activation.name, {n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in values.items()})
