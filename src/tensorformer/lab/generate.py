"""Sampling text from a finished run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tensorformer.data import tokenizer
from tensorformer.data.decoder import Decoder
from tensorformer.data.tokenizer import Tokenizer
from tensorformer.errors import CheckpointError, ConfigError, DivergenceError
from tensorformer.lab import checkpoint, record
from tensorformer.lab.batching import ContinuousBatch
from tensorformer.lab.stop_text import StopText
from tensorformer.nn.model import TensorTransformer


def load_run(folder: Path, device: torch.device) -> tuple[TensorTransformer, Tokenizer]:
    """Return the model and tokenizer of a run, from its last checkpoint."""
    run = record.read_run(folder)
    if run.data.probe is not None:
        raise ConfigError(f"{folder}: a run on a probe, which has no text; name a run that was trained on text")
    last = checkpoint.latest(folder)
    if last is None:
        raise CheckpointError(f"{folder}: has no checkpoint yet; train it first")
    model = TensorTransformer(run.model, run.seed).to(device)
    checkpoint.load(last, model)
    return model.eval(), tokenizer.load(folder)


def generate(
    model: TensorTransformer,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stop: Collection[int],
    vocab_size: int,
) -> Iterator[int]:
    """Yield sampled tokens one at a time.

    Args:
        model: whose last logits are sampled.
        prompt: tokens to go on from, at least one.
        n_tokens: most tokens to yield.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability are drawn (Holtzman et al. 2020).
        seed: of the draws.
        stop: tokens of which each ends the text; it is not yielded.
        vocab_size: the tokenizer's; a model may have room for more.

    Raises:
        ConfigError: an argument is out of its range.
        DivergenceError: the model's logits are not finite.
    """
    batch = ContinuousBatch(model, vocab_size)
    batch.add(prompt, n_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    while batch.handles:
        for got in batch.step():
            if got.ended == "not finite":
                raise _not_finite("the text")
            if got.token is not None:
                yield got.token


class Piece(NamedTuple):
    """Some more text of one prompt, and whether that is the end of it."""

    prompt: int
    text: str
    last: bool


def write_on(
    model: TensorTransformer,
    words: Tokenizer,
    prompts: Sequence[str],
    n_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stop: Sequence[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Piece]:
    """Return the texts that go on from some prompts, piece by piece as they come, never half a character.

    Each prompt is the beginning of a document and gets the text it would get alone.

    Args:
        model: the one.
        words: its tokenizer.
        prompts: texts to go on from; an empty one is the beginning of any document.
        n_tokens: most tokens a prompt.
        temperature, top_p, seed: as for ``generate``, for each prompt.
        stop: texts of which the first to come ends a prompt's text before it.
        stopped: asked before each step; true ends all texts as they are.

    Raises:
        ConfigError: an argument is out of its range.
        DivergenceError: the logits of a prompt are not finite; the texts of the others come first.
    """
    end = words.end_of_document
    batch = ContinuousBatch(model, words.vocab_size)
    texts: dict[int, _Text] = {}
    for i, prompt in enumerate(prompts):
        tokens = [end, *map(int, words.encode(prompt))]
        handle = batch.add(tokens, n_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=(end,))
        texts[handle] = _Text(i, words.decoder(), StopText(stop))
    return _pieces(batch, texts, stopped)


class _Text(NamedTuple):
    """The text of one prompt while it comes."""

    prompt: int
    decoder: Decoder
    ending: StopText

    def push(self, token: int | None) -> str:
        return "" if token is None else self.ending.push(self.decoder.push(token))

    def finish(self) -> str:
        return self.ending.push(self.decoder.finish()) + self.ending.finish()


def _pieces(batch: ContinuousBatch, texts: dict[int, _Text], stopped: Callable[[], bool]) -> Iterator[Piece]:
    broken: list[str] = []
    while batch.handles and not stopped():
        for handle, token, ended in batch.step():
            text = texts[handle]
            new = text.push(token) + (text.finish() if ended else "")
            if text.ending.found and not ended:
                batch.remove(handle)
            if ended == "not finite":
                broken.append(str(text.prompt + 1))
            yield Piece(text.prompt, new, text.ending.found or ended is not None)
    for handle in batch.handles:
        yield Piece(texts[handle].prompt, texts[handle].finish(), True)
    if broken:
        raise _not_finite("the text of prompt " + ", ".join(broken))


def _not_finite(what: str) -> DivergenceError:
    return DivergenceError(f"{what} ends here: the model's logits are not finite; sample an earlier checkpoint")
