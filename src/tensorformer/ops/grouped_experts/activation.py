"""What an expert does between its two products: a gate on two halves, or a function of one variable."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tensorformer.errors import ConfigError, suggest
from tensorformer.gates import GATES, SCALARS, Gate, Scalar, activation
from tensorformer.ops.operands import LAYOUTS, bound, halves


class Activation(NamedTuple):
    """A gate with the layout of its two halves, or a scalar; parameters that are tensors fit (experts, 1, d_ff)."""

    gate: Gate | Scalar
    layout: str

    def __call__(self, pre: Tensor) -> Tensor:
        """Return h (rows, d_ff) of projections (rows, 2·d_ff), of a scalar (rows, d_ff); differentiable."""
        return self.gate(*self.views(pre))

    def views(self, pre: Tensor) -> tuple[Tensor, ...]:
        """Return g and u, or the one projection, as views: of an empty gradient these are the places of theirs."""
        return halves(pre, self.layout) if isinstance(self.gate, Gate) else (pre,)

    @property
    def projections(self) -> int:
        """How many projections it takes."""
        return 2 if isinstance(self.gate, Gate) else 1

    @property
    def kind(self) -> str:
        """Which half of the catalogue it is from: "gate" or "scalar"."""
        return "gate" if isinstance(self.gate, Gate) else "scalar"

    @property
    def formulas(self) -> tuple[str, ...]:
        """Its formula, or those of its two factors."""
        gate = self.gate
        return (gate.gate.formula, gate.value.formula) if isinstance(gate, Gate) else (gate.formula,)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters that are tensors, by name."""
        return {n: v for n, v in self.gate.parameters.items() if isinstance(v, Tensor)}

    @property
    def differs(self) -> bool:
        """Whether a parameter may differ from expert to expert."""
        return any(v.dim() == 3 for v in self.tensors.values())

    def with_tensors(self, values: tuple[Tensor, ...]) -> Activation:
        """Return it with these for the parameters that are tensors, in order."""
        return self._replace(gate=self.gate.bind(**dict(zip(self.tensors, values, strict=True)))) if values else self

    def on_rows(self, experts: Tensor) -> Activation:
        """Return it for rows that belong to these experts (rows,): what is one an expert becomes one a row."""
        return self.with_tensors(tuple(_on_rows(v, experts) for v in self.tensors.values()))


def ready(gate: Gate | Scalar | str, layout: str) -> Activation:
    """Return an activation ready to use.

    Raises:
        GateError: there is no such gate or function, or a parameter is missing.
        ConfigError: an unknown layout, or one for a function of one variable.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}{suggest(str(layout), LAYOUTS)}")
    if isinstance(gate, str):
        # Looked up where it can be, not bound anew: one that has been used has its kernel at hand.
        found = GATES[gate] if gate in GATES else SCALARS[gate] if gate in SCALARS else activation(gate)
    else:
        found = gate
    if not isinstance(found, Scalar):
        return Activation(bound(found), layout)
    if layout != "gate_up":
        raise ConfigError(f"layout={layout!r} with {found.name!r}, which has one projection: leave layout out")
    return Activation(found if len(found.parameters) == len(found.needs) else found.bind(), layout)


def _on_rows(parameter: Tensor, experts: Tensor) -> Tensor:
    if parameter.dim() < 3:
        return parameter
    rows = parameter.squeeze(1)
    return rows if len(rows) == 1 else rows.index_select(0, experts)
