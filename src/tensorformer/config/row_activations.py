"""Activations that need the whole row, and so are layers: what a recipe may say of them, and what they weigh.

``nn/row_activations.py`` computes them. An elementwise activation is in ``gates/catalogue.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from tensorformer.errors import GateError, suggest
from tensorformer.gates import SCALARS


@final
@dataclass(frozen=True)
class RowActivation:
    """An activation over a row of features.

    Args:
        name: the name it is known by.
        gated: whether it takes the gate and the up projection, or the up projection alone.
        formula: in words a reader of a recipe understands.
        source: where it comes from.
        models: models that use it.
        weights: the number of trained weights at a hidden width.
        moment: E[h²] for standard normal inputs, from its parameters.
        needs: its parameters, each with its open interval.
        parameters: their values.
    """

    name: str
    gated: bool
    formula: str
    source: str
    models: tuple[str, ...]
    weights: Callable[[int], int]
    moment: Callable[[Mapping[str, float]], float]
    needs: Mapping[str, tuple[float, float]]
    parameters: Mapping[str, float]

    @property
    def second_moment(self) -> float:
        """E[h²] where the projections are standard normal: what the first weights of the down projection need."""
        return self.moment(self.parameters)

    def bind(self, **parameters: object) -> RowActivation:
        """Return it with its parameters set.

        Raises:
            GateError: a parameter is unknown, missing, or out of its range.
        """
        parameters = {**self.parameters, **parameters}
        for extra in parameters.keys() - self.needs.keys():
            raise GateError(f"{self.name!r} has no parameter {extra!r}{suggest(extra, self.needs)}")
        values: dict[str, float] = {}
        for name, (low, high) in self.needs.items():
            value = parameters.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
                raise GateError(f"{self.name!r} needs {name}, a number between {low:g} and {high:g}, not {value!r}")
            values[name] = float(value)
        return RowActivation(**{**self.__dict__, "parameters": values})


def sparsity_cutoff(sparsity: float) -> float:
    """Return the z below which a standard normal number falls with probability ``sparsity``."""
    from scipy.special import ndtri

    return float(ndtri(sparsity))


def _sparse_moment(parameters: Mapping[str, float]) -> float:
    """Return ∫ gelu_tanh(z − c)² over the normal law above the cut-off c, by the trapezium rule."""
    cutoff = sparsity_cutoff(parameters["sparsity"])
    z = torch.linspace(cutoff, max(cutoff, 0.0) + 12, 2**16, dtype=torch.float64, device="cpu")
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.trapezoid(SCALARS["gelu_tanh"](z - cutoff).square() * density, z).item()


# Σ xⁱ/rms(xⁱ)/3: the three terms have mean square 1; x and x³ correlate by 3/√15.
_POLYNORM_MOMENT = (3 + 6 / math.sqrt(15)) / 9

ROW_ACTIVATIONS: Mapping[str, RowActivation] = {
    a.name: a
    for a in (
        RowActivation(
            "polynorm",
            False,
            "w₁ x³/rms(x³) + w₂ x²/rms(x²) + w₃ x/rms(x) + b of the up projection",
            "arXiv:2411.03884",
            (),
            lambda d_ff: 4,
            lambda _: _POLYNORM_MOMENT,
            {},
            {},
        ),
        RowActivation(
            "polynorm_glu",
            True,
            "polynorm(gate)·up",
            "arXiv:2411.03884",
            ("Motif",),
            lambda d_ff: 4,
            lambda _: _POLYNORM_MOMENT,
            {},
            {},
        ),
        RowActivation(
            "geglu_tanh_sparse",
            True,
            "gelu_tanh(max(0, gate − (mean + Φ⁻¹(sparsity)·std)))·up, mean and std over the row",
            "Gemma 3n, config.json",
            ("Gemma 3n (its first ten layers, sparsity 0.95)",),
            lambda d_ff: 0,
            _sparse_moment,
            {"sparsity": (0.0, 1.0)},
            {},
        ),
        RowActivation(
            "relu2_glu_norm",
            True,
            "RMSNorm(max(0, gate)²·up) with gain",
            "arXiv:2504.12285",
            ("BitNet",),
            lambda d_ff: d_ff,
            lambda _: 1.0,
            {},
            {},
        ),
    )
}
