"""What a run is trained and judged on, wherever it comes from: a corpus of text, or a probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensorformer.config.schema import Data
from tensorformer.data.batches import Batches, Windows, evaluation_windows
from tensorformer.data.prepare import Corpus, prepare
from tensorformer.data.probes import GeneratedProbe
from tensorformer.data.split import Part

Examples = Corpus | GeneratedProbe


def open_examples(data: Data) -> Examples:
    """Return the probe that the data names, or the prepared corpus; see ``prepare`` for what it raises."""
    return prepare(data) if data.probe is None else GeneratedProbe(data.probe)


def training_batches(examples: Examples, context: int, batch_size: int, seed: int) -> Callable[[int], Windows]:
    """Return step → inputs and targets, (batch_size, context) each: the same for every variant, after every restart."""
    if isinstance(examples, GeneratedProbe):
        return lambda step: examples.batch(step, context, batch_size, seed)
    return Batches(examples.train.tokens, context, batch_size, seed).batch


def held_out(
    examples: Examples, part: Part, context: int, limit_tokens: int, span: int | None = None
) -> Iterator[Windows]:
    """Yield what a run is judged on, in windows of ``context`` tokens.

    Args:
        examples: the source.
        part: validation or tuning.
        context: tokens a window.
        limit_tokens: of all windows together at most (but one window at least).
        span: text is cut into windows out of stretches of this many tokens, so that several contexts score the same
            text; an example of a probe is made for its context.
    """
    if isinstance(examples, GeneratedProbe):
        return examples.held_out(part, context, limit_tokens)
    return evaluation_windows(getattr(examples, part).tokens, context, limit_tokens, span=span)
