"""Listening to the feed-forward layers of a model without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tensorformer.config.activations import Activation
from tensorformer.config.row_activations import RowActivation
from tensorformer.errors import ConfigError
from tensorformer.nn.feedforward import FeedForward
from tensorformer.nn.moe import RoutedExperts

Receive = Callable[[str, Tensor | None, Tensor, Tensor], None]


def feed_forwards(model: nn.Module) -> dict[str, FeedForward]:
    """Return the feed-forward layers of a model by their path in it.

    Raises:
        ConfigError: it has none, or routed experts, whose inside is one operator that nothing can listen to.
    """
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            raise ConfigError(f"{name}: ranges inside routed experts are not measured; give a model without mixtures")
    found = {name or "ffn": m for name, m in model.named_modules() if isinstance(m, FeedForward)}
    if not found:
        raise ConfigError(f"{type(model).__name__} has no FeedForward layer; give a model that is built of them")
    return found


def activation_of(layer: FeedForward) -> Activation:
    """Return a layer's activation with its trained parameters as they are now."""
    if layer.learned is None or isinstance(layer.activation, RowActivation):
        return layer.activation
    # Not as numbers: training may have left the range that a recipe may name.
    return layer.activation.bind(**{name: p.detach().cpu() for name, p in layer.learned.items()})


@contextlib.contextmanager
def listening(layers: dict[str, FeedForward], receive: Receive) -> Iterator[None]:
    """Call ``receive(name, g, u, h)`` at every pass through a layer, until the block is left, however it is left.

    Each is (tokens, d_ff): g what ``gate_proj`` gave (None without one), u what ``up_proj`` gave, h what goes into
    ``down_proj``.
    """
    handles = []
    try:
        for name, layer in layers.items():
            handles += _attach(name, layer, receive)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every part of it back into the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _attach(name: str, layer: FeedForward, receive: Receive) -> list[Any]:
    seen: dict[str, Tensor] = {}

    def keep(key: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.update({key: _rows(output)})

    def hand_over(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        receive(name, seen.pop("gate", None), seen.pop("up"), _rows(inputs[0]))

    handles = [layer.up_proj.register_forward_hook(keep("up"))]
    if layer.is_gated:
        handles.append(layer.gate_proj.register_forward_hook(keep("gate")))
    return [*handles, layer.down_proj.register_forward_pre_hook(hand_over)]


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])
