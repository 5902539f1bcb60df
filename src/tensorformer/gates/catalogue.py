"""Every activation of the field, on one page. Adding one is a line here; tests, kernels and docs follow.

An activation here is elementwise. What needs the whole row (PolyNorm, Gemma 3n's sparse gate, BitNet's inner norm) is
a layer in ``nn``. GELU exact, tanh and quick are three functions, and none stands in for another. A parameter that
belongs to a checkpoint has no default. Aliases are the names that transformers, vLLM and others give the very same
function; their "swish" is SiLU, which here is "silu".
"""

from __future__ import annotations

from typing import Any

from tensorformer.errors import GateError, suggest
from tensorformer.gates.gate import Gate, Scalar
from tensorformer.gates.parameters import Parameter
from tensorformer.gates.registry import Catalogue

# fmt: off
# Name · formula · limits at −∞ and +∞ · source · parameters and their ranges.
SCALARS: Catalogue[Scalar] = Catalogue(Scalar, (
    Scalar("identity", "x", ("-oo", "oo"), "arXiv:2002.05202", aliases=("linear",)),
    Scalar("square", "x**2", ("oo", "oo"), "arXiv:2109.08668"),
    Scalar("cube", "x**3", ("-oo", "oo"), "arXiv:2109.08668"),
    Scalar("relu", "relu(x)", ("0", "oo"), "arXiv:1706.03762", models=("OPT", "T5")),
    Scalar("relu2", "relu(x)**2", ("0", "oo"), "arXiv:2109.08668", models=("Nemotron-3", "Arcee", "nanochat"),
           aliases=("relu_squared", "squared_relu")),
    Scalar("relu6", "clip(x, 0, 6)", ("0", "6"), "arXiv:1704.04861"),
    Scalar("leaky_relu", "select(0, x, x, negative_slope*x)", ("-oo", "oo"), "arXiv:1505.00853",
           {"negative_slope": "> 0"}),
    Scalar("fatrelu", "select(x, threshold, 0, x)", ("0", "oo"), "arXiv:2402.13516", {"threshold": ">= 0"},
           without=("relu(x)", ("0", "oo"))),
    Scalar("sigmoid", "sigmoid(x)", ("0", "1"), "arXiv:1612.08083"),
    Scalar("hard_sigmoid", "clip(x + 3, 0, 6)/6", ("0", "1"), "arXiv:1905.02244", aliases=("hardsigmoid",)),
    Scalar("tanh", "tanh(x)", ("-1", "1"), "arXiv:1612.08083"),
    Scalar("gelu", "x*Phi(x)", ("0", "oo"), "arXiv:1606.08415", models=("BERT",), aliases=("gelu_python",)),
    # ½(1 + tanh(y)) is σ(2y), which keeps its left tail.
    Scalar("gelu_tanh", "x*sigmoid(2*sqrt(2/pi)*x*(1 + 0.044715*x**2))", ("0", "oo"), "arXiv:1606.08415",
           models=("GPT-2",), aliases=("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh",
                                       "gelu_python_tanh")),
    Scalar("gelu_quick", "x*sigmoid(1.702*x)", ("0", "oo"), "arXiv:1606.08415", models=("CLIP",),
           aliases=("quick_gelu",)),
    Scalar("gelu_10", "clip(x*Phi(x), -10, 10)", ("0", "10"), "arXiv:2004.09602"),
    Scalar("laplace", "Phi((x - 0.707107)/0.282095)", ("0", "1"), "arXiv:2209.10655"),
    Scalar("silu", "x*sigmoid(x)", ("0", "oo"), "arXiv:1702.03118"),
    Scalar("swish", "x*sigmoid(beta*x)", ("0", "oo"), "arXiv:1710.05941", {"beta": ">= 0"},
           without=("x/2", ("-oo", "oo"))),
    Scalar("hard_swish", "x*clip(x + 3, 0, 6)/6", ("0", "oo"), "arXiv:1905.02244", aliases=("hardswish",)),
    # tanh(log(1 + eˣ)) is (1 − r²)/(1 + r²) with r = σ(−x).
    Scalar("mish", "x*sigmoid(x)*(1 + sigmoid(-x))/(1 + sigmoid(-x)**2)", ("0", "oo"), "arXiv:1908.08681"),
    Scalar("softplus", "softplus(x)", ("0", "oo"), "arXiv:1505.00853"),
    Scalar("elu", "select(0, x, x, alpha*expm1(x))", ("-alpha", "oo"), "arXiv:1511.07289", {"alpha": "> 0"}),
    Scalar("selu", "1.0507009873554805*select(0, x, x, 1.6732632423543772*expm1(x))",
           ("-1.0507009873554805*1.6732632423543772", "oo"), "arXiv:1706.02515"),
    # α_p and α_n as a checkpoint stores them, before the softplus. Written so that no part overflows before the whole.
    Scalar("xielu", "select(0, x, x*(softplus(alpha_p)*x + beta), "
           "(beta + softplus(alpha_n))*expm1(cap(x, -1e-6)) - softplus(alpha_n)*x)", ("oo", "oo"), "arXiv:2411.13010",
           {"alpha_p": "any number", "alpha_n": "any number", "beta": ">= 0"}, models=("Apertus",)),
    Scalar("softcap", "c*tanh(x/c)", ("-c", "c"), "Gemma 2, arXiv:2408.00118", {"c": "> 0"}),
    # The halves of the gates below that are not among these already.
    Scalar("powlu_gate", "select(0, x, exp(m*log(positive(x))/(sqrt(positive(x)) + 1))*sigmoid(x), x*sigmoid(x))",
           ("0", "1"), "arXiv:2605.25704", {"m": "> 0"}),
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
))


def _gate(name: str, gate: str, value: str, source: str, *models: str, **more: Any) -> Gate:
    return Gate(name, SCALARS[gate], SCALARS[value], source, models, **more)


# Name · φ of the gate projection · ψ of the up projection · source · models.
GATES: Catalogue[Gate] = Catalogue(Gate, (
    _gate("glu", "sigmoid", "identity", "arXiv:1612.08083"),
    _gate("gtu", "sigmoid", "tanh", "arXiv:1612.08083"),
    _gate("bilinear", "identity", "identity", "arXiv:2002.05202", "Evo 2 (all but the first layer)"),
    _gate("reglu", "relu", "identity", "arXiv:2002.05202"),
    _gate("geglu", "gelu", "identity", "arXiv:2002.05202", "Evo 2 (first layer)"),
    _gate("geglu_tanh", "gelu_tanh", "identity", "arXiv:2002.05202", "Gemma 1–4"),
    _gate("swiglu", "silu", "identity", "arXiv:2002.05202", "Llama", "Mistral", "Qwen2/3", "DeepSeek-V3", "SmolLM"),
    _gate("swish_glu", "swish", "identity", "arXiv:2002.05202"),
    _gate("situ", "situ_gate", "situ_value", "Kimi K3, config.json", "Kimi K3", "Inkling-2"),
    _gate("swiglu_oai", "swish_capped", "clip_plus_one", "arXiv:2508.10925", "gpt-oss", "MiniMax-M3",
          aliases=("swigluoai",)),
    _gate("swiglu_clamped", "silu_capped", "clip", "DeepSeek-V4, config.json", "DeepSeek-V4", "GLM-5.3-Flash",
          "Hy4 (routed)"),
    _gate("swiglu_clamp_after", "cap_after_silu", "clip", "Step-3.7-Flash, config.json", "Step-3.7-Flash"),
    _gate("powlu", "powlu_gate", "identity", "arXiv:2605.25704"),
    # Without exp and without division, as DeepSeek-V4's report proposes for kernels.
    _gate("relu2_glu", "relu2", "identity", "arXiv:2402.03804", "BitNet (before its inner norm)"),
    _gate("drelu", "relu", "relu", "arXiv:2406.05955", "TurboSparse"),
    _gate("fatreglu", "fatrelu", "identity", "arXiv:2402.13516", "MiniCPM-S"),
    _gate("hard_sigmoid_glu", "hard_sigmoid", "identity", "arXiv:1905.02244"),
    _gate("hard_swish_glu", "hard_swish", "identity", "arXiv:1905.02244"),
    _gate("bilinear_clamped", "clip", "clip", "arXiv:2002.05202"),
    _gate("square_glu", "square", "identity", "arXiv:2109.08668"),
    _gate("cube_glu", "cube", "identity", "arXiv:2109.08668"),
))
# fmt: on


def activation(name: str, **parameters: Parameter) -> Scalar | Gate:
    """Return the activation called ``name``, ready to use: a Gate for three matrices, a Scalar for two.

    Args:
        name: a key of ``GATES`` or ``SCALARS``, or an alias of one.
        parameters: the values of its parameters; those that belong to a checkpoint have no default.

    Raises:
        GateError: the name is unknown, or a parameter is missing, unknown, out of its range, or NaN.
    """
    if name in GATES:
        return GATES[name].bind(**parameters)
    if name in SCALARS:
        return SCALARS[name].bind(**parameters)
    raise GateError(f"unknown activation {name!r}{suggest(name, [*GATES, *SCALARS])}")
