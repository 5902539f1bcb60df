"""Linear attention of degree one and two, with or without a decay: recurrent, chunked and quadratic forms."""

from tensorformer.ops.linear_attention.api import linear_attention, resolve
from tensorformer.ops.linear_attention.flops import flops
from tensorformer.ops.linear_attention.plan import Plan

__all__ = ["Plan", "flops", "linear_attention", "resolve"]
