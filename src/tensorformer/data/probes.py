"""Probes: tasks that are generated, with no text and no file, and of which all that can be known is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec
import torch

from tensorformer.config.schema import Probe
from tensorformer.data.batches import EVALUATION_BATCH, Windows
from tensorformer.data.probe_draws import draw
from tensorformer.data.probe_tasks import UNSCORED, Task, task_of
from tensorformer.data.split import PARTS, Part

_FORMAT = 1  # rises when the same probe gives other examples


class GeneratedProbe:
    """A probe as a source of examples: each is a function of its part, its seed, its context and its number.

    Training examples differ from seed to seed and are never drawn twice; those that a run is judged on are the same for
    every seed. The three parts are separate streams, which share an example no more often than two draws of it do.

    Args:
        probe: which, and how large.
    """

    def __init__(self, probe: Probe) -> None:
        self.task: Task = task_of(probe)
        self.vocab_size = probe.vocab_size
        self.fingerprint = hashlib.sha256(msgspec.json.encode((_FORMAT, probe), order="sorted")).hexdigest()

    def examples(self, part: Part, seed: int, first: int, n: int, context: int) -> Windows:
        """Return n successive examples.

        Args:
            part: the stream.
            seed: of the training part; 0 for the others.
            first: number of the first example, from 0.
            n: how many.
            context: tokens of each.

        Returns:
            Inputs and targets, two (n, context) int64 tensors; a target is the answer to be given after the input token
            at its place, or −100 where none is asked for.
        """
        draws = draw((PARTS.index(part), seed), first, n, self.task.n_draws(context))
        inputs, targets = self.task.make(draws, context)
        return torch.from_numpy(inputs).contiguous(), torch.from_numpy(targets).contiguous()

    def batch(self, step: int, context: int, batch_size: int, seed: int) -> Windows:
        """Return the examples of one training step, counted from 0."""
        if step < 0:
            raise ValueError(f"step {step}: steps are counted from 0")
        return self.examples("train", seed, step * batch_size, batch_size, context)

    def held_out(self, part: Part, context: int, limit_tokens: int) -> Iterator[Windows]:
        """Yield the examples that a run is judged on: the first ones of the part, always the same.

        Args:
            part: validation or tuning.
            context: tokens of each.
            limit_tokens: of all together at most (but one example at least).
        """
        count, batch_size = max(1, limit_tokens // context), max(1, EVALUATION_BATCH // context)
        for first in range(0, count, batch_size):
            yield self.examples(part, 0, first, min(batch_size, count - first), context)

    def perfect(self, part: Part, context: int, limit_tokens: int) -> tuple[float, int]:
        """Return the accuracy of one who knows the rules on ``held_out``'s answers, and how many answers there are."""
        right = count = 0
        for inputs, targets in self.held_out(part, context, limit_tokens):
            known = torch.tensor([self.task.solve(row) for row in inputs.tolist()])
            scored = targets != UNSCORED
            right += int((known == targets)[scored].sum())
            count += int(scored.sum())
        return right / count, count
