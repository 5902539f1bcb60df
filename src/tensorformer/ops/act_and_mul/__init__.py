"""A gate applied to its two halves: φ(g)·ψ(u), whole and in one piece, forward and backward."""

from tensorformer.ops.act_and_mul.api import act_and_mul, resolve

__all__ = ["act_and_mul", "resolve"]
