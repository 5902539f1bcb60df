"""Linear attention of degree one and two, decayed or not, additive or by the delta rule, in every form."""

from tensorformer.ops.linear_attention.api import linear_attention, resolve
from tensorformer.ops.linear_attention.flops import flops
from tensorformer.ops.linear_attention.plan import Plan
from tensorformer.ops.linear_attention.segments import segments_from_cu_seqlens

__all__ = ["Plan", "flops", "linear_attention", "resolve", "segments_from_cu_seqlens"]
