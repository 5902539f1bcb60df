"""Experts of a mixture: each row through the feed-forward layers it was routed to, summed with its weights."""

from tensorformer.ops.grouped_experts.api import grouped_experts, resolve

__all__ = ["grouped_experts", "resolve"]
