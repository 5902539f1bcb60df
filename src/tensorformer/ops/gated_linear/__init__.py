"""Two linear maps and the gate between them, φ(x W_gᵀ)·ψ(x W_uᵀ): the first half of a gated feed-forward layer."""

from tensorformer.ops.gated_linear.api import gated_linear, resolve

__all__ = ["gated_linear", "resolve"]
