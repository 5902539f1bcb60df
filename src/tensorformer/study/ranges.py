"""What goes through a gate, and what number formats make of it: of a model on text, or of made inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tensorformer.errors import ConfigError
from tensorformer.gates import GATES, Gate
from tensorformer.study import ranges_inputs as made
from tensorformer.study.ranges_hooks import activation_of, evaluating, feed_forwards, listening
from tensorformer.study.ranges_meter import LayerMeter
from tensorformer.study.ranges_result import LEGEND, Ranges
from tensorformer.study.ranges_words import findings


def compared() -> list[Gate]:
    """Return the gates that are measured on the same inputs: without caps, with soft caps, and clamped.

    The numbers are those of Kimi K3 and DeepSeek-V4.
    """
    situ = GATES["situ"].bind(beta=4.0, linear_beta=25.0)
    return [GATES["swiglu"], situ, GATES["bilinear"], GATES["swiglu_clamped"].bind(limit=10.0)]


def ranges(
    model: nn.Module, batches: Iterable[Int[Tensor, "_ _"]], gates: Sequence[Gate], source: str = "model"
) -> Ranges:
    """Measure every feed-forward layer of a model on some tokens; the model is left as it was.

    Args:
        model: tokens (batch, time) to anything, with ``FeedForward`` layers.
        batches: token ids, (batch, time), on any device; each is one forward pass, and the largest decides on memory.
        gates: to put in the place of each layer's own, one layer at a time, on the inputs it had with its own.
        source: what the result says it is of.

    Returns:
        A layer each, in the model's order. Values are measured as the model computes them, formats in float32.

    Raises:
        ConfigError: the model has no feed-forward layer, or there are no tokens.
        GateError: a parameter of a gate is not bound.
    """
    layers = feed_forwards(model)
    meters = {name: LayerMeter(name, activation_of(m), m.down_proj, gates) for name, m in layers.items()}
    device, tokens = next(model.parameters()).device, 0
    receive = lambda name, g, u, h: meters[name].update(g, u, h)  # noqa: E731
    with evaluating(model), torch.no_grad(), listening(layers, receive):
        for batch in batches:
            model(batch.to(device))
            tokens += batch.numel()
    if not tokens:
        raise ConfigError("there are no tokens to measure ranges on; give a text with at least one")
    measured = [meter.result() for meter in meters.values()]
    where = f"{source}, median over {len(measured)} layers" if len(measured) > 1 else source
    said = findings([layer.products for layer in measured], where)
    return Ranges(source, tokens, measured, said, LEGEND)


def synthetic_ranges(gates: Sequence[Gate], tokens: int, seed: int = 0) -> Ranges:
    """Measure gates on Gaussian and on heavy-tailed inputs of 1,024 units, with a random down projection to 256.

    Args:
        gates: their parameters bound.
        tokens: rows of inputs, at least one.
        seed: of the inputs and the projection.

    Returns:
        A layer for each kind of input and gate.

    Raises:
        ConfigError: no token or no gate is asked for.
        GateError: a parameter of a gate is not bound.
    """
    if tokens < 1 or not gates:
        raise ConfigError(f"{tokens} tokens and {len(gates)} gates: give at least one of each")
    down, measured, said = made.down_projection(seed), [], []
    for kind in made.KINDS:
        meters = [LayerMeter(kind, gate, down) for gate in gates]
        for g, u in made.batches(kind, tokens, seed):
            for gate, meter in zip(gates, meters, strict=True):
                meter.update(g, u, gate(g, u))
        layers = [meter.result() for meter in meters]
        said += findings([[layer.own for layer in layers]], f"{kind} inputs")
        measured += layers
    return Ranges("synthetic inputs", tokens, measured, said, LEGEND)
