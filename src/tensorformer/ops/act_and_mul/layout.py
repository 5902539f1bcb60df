"""Where the gate and the up projection lie in one tensor."""

from __future__ import annotations

from torch import Tensor

# "gate_up" in transformers and vLLM, "up_gate" in F.glu and ScatterMoE, "interleaved" in gpt-oss.
LAYOUTS = ("gate_up", "up_gate", "interleaved")


def split(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return g and u, views of ``x`` (..., 2·d_ff); of an empty dx these are the places of dg and du."""
    if layout == "interleaved":
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1) if x.shape[-1] else (x, x)
    return (first, second) if layout == "gate_up" else (second, first)
