"""Which activation a table of a recipe names: from the name and its parameters to a scalar, a gate or a row's."""

from __future__ import annotations

from tensorformer.config.row_activations import ROW_ACTIVATIONS, RowActivation
from tensorformer.config.schema import Experts, FeedForward, Learned
from tensorformer.errors import GateError, suggest
from tensorformer.gates import GATES, SCALARS, Gate, Scalar, activation

Activation = Scalar | Gate | RowActivation


def feed_forward_activation(ffn: FeedForward | Experts) -> Activation:
    """Return the activation that a feed-forward table names, its parameters bound; ``"none"`` unbinds a cap.

    A learned parameter is bound to its first value: ``learned_parameters`` says which those are.
    """
    table = {"name": ffn.gate} if isinstance(ffn.gate, str) else ffn.gate
    name = table.get("name")
    if not isinstance(name, str):
        raise GateError('a gate table needs its name: { name = "situ", beta = 4.0, linear_beta = 25.0 }')
    parameters: dict[str, float | None] = {}
    for key, value in table.items():
        if isinstance(value, str) and key != "name" and value != "none":
            raise GateError(f'{key} = "{value}": write a number, or "none" where the formula has a form without it')
        if key != "name":
            first = value.learned if isinstance(value, Learned) else value
            parameters[key] = None if isinstance(first, str) else first
    if name in ROW_ACTIVATIONS:
        if learned_parameters(ffn):
            raise GateError(f"{name!r} has its own trained weights and no parameter to learn besides")
        return ROW_ACTIVATIONS[name].bind(**parameters)
    if name in GATES or name in SCALARS:
        return activation(name, **parameters)
    raise GateError(f"unknown activation {name!r}{suggest(name, [*GATES, *SCALARS, *ROW_ACTIVATIONS])}")


def learned_parameters(ffn: FeedForward | Experts) -> dict[str, float]:
    """Return the activation's parameters that are trained, with their first values."""
    table = {} if isinstance(ffn.gate, str) else ffn.gate
    return {name: value.learned for name, value in table.items() if isinstance(value, Learned)}


def is_gated(activation: Activation) -> bool:
    """Say whether a feed-forward layer around it has three matrices rather than two."""
    return activation.gated if isinstance(activation, RowActivation) else isinstance(activation, Gate)
