"""Activations: scalar functions, and gates that are products of two."""

from tensorformer.gates.catalogue import GATES, SCALARS, activation
from tensorformer.gates.gate import Gate, Scalar

__all__ = ["GATES", "SCALARS", "Gate", "Scalar", "activation"]
