"""The presets of linear attention: each a point of the operator's grid, and what stands around it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tensorformer.config.schema import LinearAttention, LinearPreset, OutputGate, OutputNorm
from tensorformer.ops.linear_attention.plan import Decayed, Update

GLA_RANK = 16  # inner width of GLA's decay gate
GLA_TEMPERATURE = 16  # GLA's decay is the 16th root of a sigmoid


class Preset(NamedTuple):
    """One kind of linear attention, nothing left to default.

    The decay is one of

    - ``none``;
    - ``fixed``: RetNet's constants 1 − 2^(−5−i), one a head;
    - ``sigmoid``: σ(Wx + b), one a head;
    - ``step``: exp(−e^A · Δ) with Δ = softplus(Wx + b), one a head (Mamba-2, Gated DeltaNet);
    - ``channel_sigmoid``: σ(W₂W₁x + b)^(1/16), one a key channel (GLA);
    - ``channel_step``: as ``step`` with Δ a key channel and W = W₂W₁ (Kimi Delta Attention).
    """

    degree: Literal[1, 2]  # branches whose scores are multiplied
    source: str
    equal: bool = False  # at degree two: both branches are one, so that every score is a square
    update: Update = "additive"
    decay: Literal["none", "fixed", "sigmoid", "step", "channel_sigmoid", "channel_step"] = "none"
    written: Literal["all", "beta", "step"] = "all"  # what v is scaled by: 1, β = max_beta · σ(Wx), or the decay's Δ
    max_beta: float = 1.0
    unit: Literal["none", "rms", "l2"] = "rms"  # norm without gain of every q and k, each head and branch
    rotary: bool = True
    scale_power: float = -1.0  # each branch's q·k is multiplied by head_dim to this power
    taps: int = 0  # width of a short causal convolution with SiLU over q, k and v; 0: none
    taps_bias: bool = False
    shared_keys: bool = False  # all heads share one query and key unless the recipe says otherwise
    output_norm: OutputNorm = "rms"
    gain: bool = False  # of the output norm
    output_gate: OutputGate = "none"
    gate_rank: Literal["full", "value_dim"] = "full"  # of the output gate's matrix
    skip: bool = False  # adds D · v to each head's output

    @property
    def branches(self) -> int:
        """Projections of x for the queries, and as many for the keys."""
        return 1 if self.equal else self.degree

    @property
    def state(self) -> str:
        """Numbers that one of H heads carries on, with K key features a branch, V values, and H_k heads of keys."""
        kept = f" + {self.taps - 1}·(V + {2 * self.branches}·K·H_k/H)" if self.taps else ""
        return self._features + kept

    @property
    def cost(self) -> str:
        """FLOPs of one head for one token while decoding: φ(q)ᵀS and φ(k) vᵀ, and under the delta rule φ(k)ᵀS."""
        return f"{6 if self.update == 'delta' else 4}·{self._features}"

    @property
    def _features(self) -> str:
        return ("K²·" if self.degree == 2 else "K·") + ("V" if self.summed(0) == 0 else f"(V + {self.summed(0)})")

    def summed(self, value_dim: int) -> int:
        """Return the values a head sums: a row's weights are summed as one more."""
        return value_dim + (self.output_norm == "row")

    @property
    def decayed(self) -> Decayed:
        """The operator's kind of decay."""
        if self.decay == "none":
            return "none"
        return "channel" if self.decay.startswith("channel") else "head"


PRESETS: dict[LinearPreset, Preset] = {
    "bilinear": Preset(2, "Riggs 2026, Tensor Transformers: as published", output_norm="none"),
    "bilinear_norm": Preset(2, "bilinear with RMSNorm on each head's output"),
    "bilinear_decay": Preset(2, "bilinear_norm with a gate on its memory", decay="sigmoid"),
    "bilinear_delta": Preset(
        2, "bilinear_norm with the delta rule, keys of length one", update="delta", written="beta", unit="l2"
    ),
    "power": Preset(
        2, "equal branches over their row sum: Kacham et al. 2023, arXiv 2310.01655", equal=True, output_norm="row"
    ),
    "linear": Preset(1, "Katharopoulos et al. 2020, arXiv 2006.16236, with φ(x) = x and no denominator"),
    "retention": Preset(
        1,
        "Sun et al. 2023, RetNet, arXiv 2307.08621",
        decay="fixed",
        unit="none",
        scale_power=-0.5,
        output_gate="swish",
    ),
    "gla": Preset(
        1,
        "Yang et al. 2023, Gated Linear Attention, arXiv 2312.06635",
        decay="channel_sigmoid",
        unit="none",
        rotary=False,
        scale_power=-0.5,
        gain=True,
        output_gate="swish",
    ),
    "ssd": Preset(
        1,
        "Dao & Gu 2024, Mamba-2, arXiv 2405.21060",
        decay="step",
        written="step",
        unit="none",
        rotary=False,
        scale_power=0.0,
        taps=4,
        taps_bias=True,
        shared_keys=True,
        output_norm="gated_rms",
        gain=True,
        output_gate="swish",
        skip=True,
    ),
    "gdn": Preset(
        1,
        "Yang et al. 2024, Gated DeltaNet, arXiv 2412.06464",
        update="delta",
        decay="step",
        written="beta",
        unit="l2",
        rotary=False,
        scale_power=-0.5,
        taps=4,
        gain=True,
        output_gate="swish",
    ),
    "kda": Preset(
        1,
        "Kimi Team 2025, Kimi Delta Attention, arXiv 2510.26692",
        update="delta",
        decay="channel_step",
        written="beta",
        unit="l2",
        rotary=False,
        scale_power=-0.5,
        taps=4,
        gain=True,
        output_gate="sigmoid",
        gate_rank="value_dim",
    ),
}


def resolved(mixer: LinearAttention) -> Preset:
    """Return the preset that a mixer's table names, with what the table says otherwise."""
    preset = PRESETS[mixer.preset]
    return preset._replace(
        output_norm=mixer.output_norm or preset.output_norm,
        output_gate=mixer.output_gate or preset.output_gate,
        max_beta=mixer.max_beta or (2.0 if mixer.allow_neg_eigval else 1.0),
    )
