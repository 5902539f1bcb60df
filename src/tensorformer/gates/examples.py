"""Parameter values to try an activation with: those of the models that use it."""

from __future__ import annotations

from typing import TypeVar

from tensorformer.gates.gate import Gate, Scalar

EXAMPLES = {
    "alpha": 1.702,  # gpt-oss
    "alpha_n": 0.3,
    "alpha_p": -0.2,
    "beta": 4.0,  # Kimi K3
    "c": 30.0,  # Gemma 2's last logits
    "limit": 7.0,  # gpt-oss
    "linear_beta": 25.0,  # Kimi K3
    "m": 3.0,  # PowLU
    "negative_slope": 0.01,
    "threshold": 0.25,
}

Activation = TypeVar("Activation", bound=Scalar | Gate)


def example(activation: Activation) -> Activation:
    """Return ``activation`` with every parameter it still needs set to an example value."""
    missing = activation.needs.keys() - activation.parameters.keys()
    return activation.bind(**{n: EXAMPLES.get(n, 1.5) for n in missing}) if missing else activation  # pyright: ignore
