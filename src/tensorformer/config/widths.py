"""The hidden widths of a model, by name, and the same model at others."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from tensorformer.config.schema import FeedForward, Model, MoE
from tensorformer.config.shapes import blocks

ROUTED, SHARED = ".routed", ".shared"


def widths(model: Model) -> dict[str, int]:
    """Return ``d_ff`` of every feed-forward part that the model uses; a mixture ``name`` has up to two.

    They are called ``name.routed`` and ``name.shared``, and are those of one expert.
    """
    found: dict[str, int] = {}
    for _, name in blocks(model):
        part = model.ffns[name]
        if isinstance(part, FeedForward):
            found[name] = part.d_ff
            continue
        found[name + ROUTED] = part.routed.d_ff
        if part.shared is not None:
            found[name + SHARED] = part.shared.d_ff
    return found


def with_widths(model: Model, new: Mapping[str, int]) -> Model:
    """Return the model with some of its ``widths`` replaced."""

    def part(name: str, old: FeedForward | MoE) -> FeedForward | MoE:
        if isinstance(old, FeedForward):
            return replace(old, d_ff=new.get(name, old.d_ff))
        routed = replace(old.routed, d_ff=new.get(name + ROUTED, old.routed.d_ff))
        if old.shared is None:
            return replace(old, routed=routed)
        return replace(old, routed=routed, shared=replace(old.shared, d_ff=new.get(name + SHARED, old.shared.d_ff)))

    return replace(model, ffns={name: part(name, old) for name, old in model.ffns.items()})
