"""Where the gallery's sliders stand at first: at the numbers of the models that use a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorformer.gates import Gate, Scalar


@dataclass(frozen=True)
class Slider:
    """One parameter: its name, its range, the step, and the value at first."""

    name: str
    low: float
    high: float
    step: float
    value: float


# fmt: off
# (lowest, highest, step, first); "entry.parameter" where a name means different things.
_KNOWN: Mapping[str, tuple[float, float, float, float]] = {
    "beta": (0, 5, 0.05, 1),                    # Swish
    "situ.beta": (0.5, 16, 0.1, 4),             # Kimi K3
    "situ_gate.beta": (0.5, 16, 0.1, 4),
    "xielu.beta": (0, 2, 0.01, 0.5),            # Apertus
    "xielu.alpha_p": (-4, 4, 0.01, 0.2),        # softplus(0.2) ≈ 0.8, Apertus before training
    "xielu.alpha_n": (-4, 4, 0.01, -1.05),      # 0.5 + softplus(−1.05) ≈ 0.8
    "linear_beta": (1, 60, 0.5, 25),            # Kimi K3
    "alpha": (0.1, 4, 0.002, 1.702),            # gpt-oss
    "elu.alpha": (0.1, 3, 0.05, 1),
    "limit": (0.5, 20, 0.1, 7),                 # gpt-oss, Step-3.7-Flash
    "swiglu_clamped.limit": (0.5, 20, 0.1, 10),  # DeepSeek-V4
    "silu_capped.limit": (0.5, 20, 0.1, 10),
    "bilinear_clamped.limit": (0.5, 20, 0.1, 10),
    "c": (1, 60, 0.5, 30),                      # Gemma 2, logits
    "m": (0.5, 8, 0.05, 3),                     # PowLU
    "threshold": (0, 3, 0.05, 0.5),
    "negative_slope": (0.005, 1, 0.005, 0.01),  # torch
}
# fmt: on
_UNKNOWN = (0.05, 10, 0.05, 1)  # of another package: within every range that a parameter may have


def sliders(of: Scalar | Gate) -> list[Slider]:
    """Return a slider for each parameter of ``of``; a number that is bound already is where its slider begins."""
    found = []
    for name in of.needs:
        low, high, step, value = _KNOWN.get(f"{of.name}.{name}", _KNOWN.get(name, _UNKNOWN))
        bound = of.parameters.get(name)
        if isinstance(bound, float):
            low, high, value = min(low, bound), max(high, bound), bound
        found.append(Slider(name, low, high, step, value))
    return found
