"""Every activation of the field, on one page. Adding one is a line here; tests, kernels and docs follow.

An activation here is elementwise. What needs the whole row (PolyNorm, Gemma 3n's sparse gate, BitNet's inner norm) is
a layer in ``nn``. GELU exact, tanh and quick are three functions, and none stands in for another. A parameter that
belongs to a checkpoint has no default.
"""

from __future__ import annotations

from typing import TypeVar

from tensorformer.errors import GateError, suggest
from tensorformer.gates.gate import Gate, Parameter, Scalar

Entry = TypeVar("Entry")


class Catalogue(dict[str, Entry]):
    """A dictionary whose unknown names are answered with the nearest known ones."""

    def __missing__(self, name: str) -> Entry:
        raise GateError(f"unknown activation {name!r}{suggest(str(name), self)}")


# fmt: off
# Name · formula · limits at −∞ and +∞ · source · parameters and their ranges.
SCALARS: Catalogue[Scalar] = Catalogue({s.name: s for s in (
    Scalar("identity", "x", ("-oo", "oo"), "arXiv:2002.05202"),
    Scalar("relu", "relu(x)", ("0", "oo"), "arXiv:1706.03762"),
    Scalar("relu2", "relu(x)**2", ("0", "oo"), "arXiv:2109.08668"),
    Scalar("sigmoid", "sigmoid(x)", ("0", "1"), "arXiv:1612.08083"),
    Scalar("tanh", "tanh(x)", ("-1", "1"), "arXiv:1612.08083"),
    Scalar("gelu", "x*Phi(x)", ("0", "oo"), "arXiv:1606.08415"),
    # ½(1 + tanh(y)) is σ(2y), which keeps its left tail.
    Scalar("gelu_tanh", "x*sigmoid(2*sqrt(2/pi)*x*(1 + 0.044715*x**2))", ("0", "oo"), "arXiv:1606.08415"),
    Scalar("gelu_quick", "x*sigmoid(1.702*x)", ("0", "oo"), "arXiv:1606.08415"),
    Scalar("silu", "x*sigmoid(x)", ("0", "oo"), "arXiv:1702.03118"),
    Scalar("swish", "x*sigmoid(beta*x)", ("0", "oo"), "arXiv:1710.05941", {"beta": ">= 0"},
           without=("x/2", ("-oo", "oo"))),
    Scalar("softcap", "c*tanh(x/c)", ("-c", "c"), "Gemma 2, arXiv:2408.00118", {"c": "> 0"}),
    Scalar("hard_swish", "x*clip(x + 3, 0, 6)/6", ("0", "oo"), "arXiv:1905.02244"),
    # The halves of the gates below that are not among these already.
    Scalar("situ_gate", "beta*tanh(x/beta)*sigmoid(x)", ("0", "beta"), "Kimi K3, config.json", {"beta": "> 0"}),
    Scalar("situ_value", "linear_beta*tanh(x/linear_beta)", ("-linear_beta", "linear_beta"), "Kimi K3, config.json",
           {"linear_beta": "> 0 or None"}, without=("x", ("-oo", "oo"))),
    Scalar("swish_capped", "cap(x, limit)*sigmoid(alpha*cap(x, limit))", ("0", "limit*sigmoid(alpha*limit)"),
           "gpt-oss, arXiv:2508.10925", {"alpha": "> 0", "limit": "> 0"}),
    Scalar("clip_plus_one", "clip(x, -limit, limit) + 1", ("1 - limit", "1 + limit"), "gpt-oss, arXiv:2508.10925",
           {"limit": "> 0"}),
    Scalar("silu_capped", "cap(x, limit)*sigmoid(cap(x, limit))", ("0", "limit*sigmoid(limit)"),
           "DeepSeek-V4, config.json", {"limit": "> 0"}),
    Scalar("cap_after_silu", "cap(x*sigmoid(x), limit)", ("0", "limit"), "Step-3.7-Flash, config.json",
           {"limit": "> 0"}),
    Scalar("clip", "clip(x, -limit, limit)", ("-limit", "limit"), "DeepSeek-V4, config.json", {"limit": "> 0"}),
)})


def _gate(name: str, gate: str, value: str, source: str, *models: str) -> tuple[str, Gate]:
    return name, Gate(name, SCALARS[gate], SCALARS[value], source, models)


# Name · φ of the gate projection · ψ of the up projection · source · models.
GATES: Catalogue[Gate] = Catalogue((
    _gate("glu", "sigmoid", "identity", "arXiv:1612.08083"),
    _gate("bilinear", "identity", "identity", "arXiv:2002.05202", "Evo 2 (all but the first layer)"),
    _gate("reglu", "relu", "identity", "arXiv:2002.05202"),
    _gate("geglu", "gelu", "identity", "arXiv:2002.05202", "Evo 2 (first layer)"),
    _gate("geglu_tanh", "gelu_tanh", "identity", "arXiv:2002.05202", "Gemma 1–4"),
    _gate("swiglu", "silu", "identity", "arXiv:2002.05202", "Llama", "Mistral", "Qwen2/3", "DeepSeek-V3", "SmolLM"),
    _gate("situ", "situ_gate", "situ_value", "Kimi K3, config.json", "Kimi K3", "Inkling-2"),
    _gate("swiglu_oai", "swish_capped", "clip_plus_one", "arXiv:2508.10925", "gpt-oss", "MiniMax-M3"),
    _gate("swiglu_clamped", "silu_capped", "clip", "DeepSeek-V4, config.json", "DeepSeek-V4", "GLM-5.3-Flash",
          "Hy4 (routed)"),
    _gate("swiglu_clamp_after", "cap_after_silu", "clip", "Step-3.7-Flash, config.json", "Step-3.7-Flash"),
))
# fmt: on


def activation(name: str, **parameters: Parameter) -> Scalar | Gate:
    """Return the activation called ``name``, ready to use: a Gate for three matrices, a Scalar for two.

    Args:
        name: a key of ``GATES`` or ``SCALARS``.
        parameters: the values of its parameters; those that belong to a checkpoint have no default.

    Raises:
        GateError: the name is unknown, or a parameter is missing, unknown, out of its range, or NaN.
    """
    if name in GATES:
        return GATES[name].bind(**parameters)
    if name in SCALARS:
        return SCALARS[name].bind(**parameters)
    raise GateError(f"unknown activation {name!r}{suggest(name, [*GATES, *SCALARS])}")
