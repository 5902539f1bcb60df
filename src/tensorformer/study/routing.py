"""Where attention looks: its weights on a text, and what they do when keys and queries change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from tensorformer.config.shapes import blocks
from tensorformer.errors import ConfigError
from tensorformer.nn.block import Block
from tensorformer.nn.linear_attention import LinearAttention
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.softmax_attention import SoftmaxAttention
from tensorformer.study.ranges_hooks import evaluating
from tensorformer.study.routing_change import Attention
from tensorformer.study.routing_meter import LayerMeter
from tensorformer.study.routing_result import GAINS, LEGEND, SCALES, Routing, Run
from tensorformer.study.routing_words import findings

LONGER = 4  # windows are this many times the training context, where the text and memory allow
LONGEST = 2048  # tokens of a window beyond the training context: a layer's weights grow with the square

Receive = Callable[[Tensor, Tensor, Tensor], None]


def window_length(context: int, tokens: int) -> int:
    """Return the tokens of a window to measure: up to four training contexts.

    Args:
        context: tokens of a training window.
        tokens: of the text.

    Raises:
        ConfigError: the text does not fill one training window.
    """
    if tokens < context:
        raise ConfigError(
            f"{tokens:,} tokens to read, and the run's windows have {context:,}: give a text, and --tokens, of as many"
        )
    return min(tokens, max(context, min(LONGER * context, LONGEST)))


def run_routing(
    model: TensorTransformer, batches: Iterable[Int[Tensor, "_ _"]], context: int, name: str = "model"
) -> Run:
    """Measure every attention layer of a model on some windows of text; the model is left as it was.

    Args:
        model: the model.
        batches: token ids, (windows, time), all of one length.
        context: tokens of a training window: sharpness, distances and changed keys are measured within it.
        name: what the result calls it.

    Returns:
        A layer each. Weights are those the model computes, statistics of them are in float64.

    Raises:
        ConfigError: the model has no attention weights to read, or there is no window, or one is too short.
    """
    mixers, names = _mixers(model, name), [mixer for mixer, _ in blocks(model.config)]
    device = next(model.parameters()).device
    meters: list[LayerMeter] = []
    windows = length = 0
    with evaluating(model), torch.no_grad(), contextlib.ExitStack() as stack:
        for batch in batches:
            if not meters:
                length = batch.shape[1]
                if length < 2:
                    raise ConfigError(f"{name}: windows of {length} token: routing needs two keys at least")
                context = min(context, length)
                for i, mixer in enumerate(mixers):
                    meters.append(LayerMeter(i, names[i], mixer, length, context))
                    stack.enter_context(_listening(mixer, meters[i].update))
            for window in batch.to(device):
                model(window.unsqueeze(0))
            windows += len(batch)
    if not meters:
        raise ConfigError(f"{name}: there are no tokens to measure routing on; give a text with at least two")
    keys, distances = meters[0].keys, [(first - 1, last - 1) for first, last in meters[0].distances]
    return Run(name, context, windows, length, keys, distances, [meter.result() for meter in meters])


def routing(runs: Sequence[Run], text: str) -> Routing:
    """Return several runs as one study, with what they say about the claims.

    Args:
        runs: measured on the same text.
        text: what it is called.
    """
    return Routing(text, SCALES, GAINS, list(runs), findings(runs), LEGEND)


def _mixers(model: TensorTransformer, name: str) -> list[Attention]:
    found = [cast(Block, block).mixer for block in model.layers]
    for i, mixer in enumerate(found):
        if not isinstance(mixer, SoftmaxAttention | LinearAttention):
            raise ConfigError(f"{name}: layer {i}'s {type(mixer).__name__} has no attention weights to read")
    return cast(list[Attention], found)


@contextlib.contextmanager
def _listening(mixer: Attention, receive: Receive) -> Iterator[None]:
    """Call ``receive(x, sums, output)`` at every pass of one window through a mixer."""
    seen: dict[str, Tensor] = {}
    summed = mixer.output if isinstance(mixer, LinearAttention) else mixer.o_proj
    handles = [
        mixer.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0])),
        summed.register_forward_pre_hook(lambda _, inputs: seen.update(sums=inputs[0].flatten(2))),
        mixer.register_forward_hook(
            lambda _, __, result: receive(seen.pop("x"), seen.pop("sums").flatten(2), result[0])
        ),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
