"""Linear attention of degree one and two, with or without a decay: recurrent, chunked and quadratic."""

from tensorformer.ops.linear_attention.api import linear_attention

__all__ = ["linear_attention"]
