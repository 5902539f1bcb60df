"""The four probes: how an example is made of draws, and how one who knows the rules answers it.

An example is a row of input tokens with the answer to each of them, ``UNSCORED`` where none is asked for. Token 0
never means anything; what the others stand for follows it in the order of the probe's fields.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import final

import numpy as np
from jaxtyping import Float64, Int64

from tensorformer.config.schema import Induction, Needle, Probe, Recall, SelectiveCopying
from tensorformer.data.probe_draws import Draws

UNSCORED = -100  # a target that torch's cross-entropy passes over
BLANK = 0
Rows = tuple[Int64[np.ndarray, "examples context"], Int64[np.ndarray, "examples context"]]


class Task(abc.ABC):
    """One probe at work."""

    name: str
    description: str  # one line for a reader
    chance: float  # accuracy of a guess among all possible answers

    @abc.abstractmethod
    def n_draws(self, context: int) -> int:
        """Return the numbers an example of ``context`` tokens is made of."""

    @abc.abstractmethod
    def make(self, draws: Draws, context: int) -> Rows:
        """Return inputs and targets, a row for each of the draws'."""

    @abc.abstractmethod
    def solve(self, row: Sequence[int]) -> list[int]:
        """Return the answer after each token as far as the tokens up to it decide it, else ``UNSCORED``."""


@final
class RecallTask(Task):
    """Key-value pairs, then each key once more among blanks; its answer is the value that followed it.

    Pair i is asked for in slot s_i of the ``context − 2·pairs`` that follow the pairs. Slots are drawn pair by pair,
    without replacement, slot s = 0, 1, … with weight (s + 1)^(power − 1). Arora et al. 2023, Zoology, arXiv 2312.04927.
    """

    name = "multi-query associative recall"

    def __init__(self, probe: Recall) -> None:
        self.probe = p = probe
        self.description = (
            f"{p.pairs} pairs of {p.keys} keys and {p.values} values; distances of queries by power {p.power:g}"
        )
        self.chance = 1 / p.values

    def n_draws(self, context: int) -> int:
        p = self.probe
        return p.keys + p.pairs + context - 2 * p.pairs

    def make(self, draws: Draws, context: int) -> Rows:
        p = self.probe
        keys = 1 + draws.arrangement(p.keys)[:, : p.pairs]
        values = 1 + p.keys + draws.integers(p.pairs, p.values)
        asked = 2 * p.pairs + draws.ranking(slot_weights(context - 2 * p.pairs, p.power))[:, : p.pairs]
        inputs, targets = _blank(draws.examples, context)
        inputs[:, 0 : 2 * p.pairs : 2] = keys
        inputs[:, 1 : 2 * p.pairs : 2] = values
        np.put_along_axis(inputs, asked, keys, axis=1)
        np.put_along_axis(targets, asked, values, axis=1)
        return inputs, targets

    def solve(self, row: Sequence[int]) -> list[int]:
        return _look_up(row, keys=range(1, 1 + self.probe.keys))


def slot_weights(slots: int, power: float) -> Float64[np.ndarray, " slots"]:
    """Return (s + 1)^(power − 1) for every slot: 1 is uniform, less prefers the first ones, near the pairs."""
    return np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)


@final
class InductionTask(Task):
    """A passage of different symbols, said again and again to the end; what followed a symbol will follow it again.

    The passage's length is drawn for each example, so that counting tokens back does not do. What follows a symbol
    that has not been met before can't be known, and is not scored. Olsson et al. 2022, arXiv 2209.11895.
    """

    name = "induction"

    def __init__(self, probe: Induction) -> None:
        self.probe = p = probe
        self.description = f"a passage of {p.shortest} to {p.longest} of {p.symbols} symbols, repeated"
        self.chance = 1 / p.symbols

    def n_draws(self, context: int) -> int:
        return self.probe.symbols + 1

    def make(self, draws: Draws, context: int) -> Rows:
        p = self.probe
        passage = 1 + draws.arrangement(p.symbols)
        length = p.shortest + draws.integers(1, p.longest - p.shortest + 1)
        at = np.arange(context + 1)[None, :]
        tokens = np.take_along_axis(passage, at % length, axis=1)
        return tokens[:, :-1], np.where(at[:, :-1] >= length, tokens[:, 1:], UNSCORED)

    def solve(self, row: Sequence[int]) -> list[int]:
        followed: dict[int, int] = {}
        answers = []
        for t, token in enumerate(row):
            if t:
                followed[row[t - 1]] = token
            answers.append(followed.get(token, UNSCORED))
        return answers


@final
class SelectiveCopyingTask(Task):
    """Symbols strewn among blanks, then as many marks; the answer to the n-th mark is the n-th symbol.

    Jing et al. 2017, Gated Orthogonal Recurrent Units, arXiv 1706.02761; Gu & Dao 2023, Mamba, arXiv 2312.00752.
    """

    name = "selective copying"

    def __init__(self, probe: SelectiveCopying) -> None:
        self.probe = p = probe
        self.description = f"{p.copied} of {p.symbols} symbols among blanks, to be said in order"
        self.chance = 1 / p.symbols

    def n_draws(self, context: int) -> int:
        return context

    def make(self, draws: Draws, context: int) -> Rows:
        p = self.probe
        places = np.sort(draws.arrangement(context - p.copied)[:, : p.copied], axis=1)
        symbols = 2 + draws.integers(p.copied, p.symbols)
        inputs, targets = _blank(draws.examples, context)
        np.put_along_axis(inputs, places, symbols, axis=1)
        inputs[:, -p.copied :] = 1
        targets[:, -p.copied :] = symbols
        return inputs, targets

    def solve(self, row: Sequence[int]) -> list[int]:
        seen: list[int] = []
        answers, marks = [], 0
        for token in row:
            answers.append(seen[marks] if token == 1 and marks < len(seen) else UNSCORED)
            marks += token == 1
            if token > 1:
                seen.append(token)
        return answers


@final
class NeedleTask(Task):
    """Random symbols, and somewhere a key before one of them; at the end the key again, which that symbol answers.

    The key stands at  round(d · (context − 3)),  d drawn evenly between the two ``depths``: 0 is the beginning, 1 as
    near the end as can be. The hay is of the same symbols as the answer, so that what to keep has to be found.
    """

    name = "needle in a haystack"

    def __init__(self, probe: Needle) -> None:
        self.probe = p = probe
        low, high = p.depths
        where = f"depth {low:g}" if low == high else f"depths {low:g} to {high:g}"
        self.description = f"one of {p.keys} keys at {where} in hay of {p.symbols} symbols"
        self.chance = 1 / p.symbols

    def n_draws(self, context: int) -> int:
        return context + 2

    def make(self, draws: Draws, context: int) -> Rows:
        p = self.probe
        low, high = p.depths
        depth = low + (high - low) * draws.shares(1)
        at = np.rint(depth * (context - 3)).astype(np.int64)
        key = 1 + draws.integers(1, p.keys)
        inputs = 1 + p.keys + draws.integers(context, p.symbols)
        np.put_along_axis(inputs, at, key, axis=1)
        inputs[:, -1:] = key
        targets = np.full_like(inputs, UNSCORED)
        targets[:, -1:] = np.take_along_axis(inputs, at + 1, axis=1)
        return inputs, targets

    def solve(self, row: Sequence[int]) -> list[int]:
        return _look_up(row, keys=range(1, 1 + self.probe.keys))


def task_of(probe: Probe) -> Task:
    """Return the probe that a recipe's table describes, at work."""
    match probe:
        case Recall():
            return RecallTask(probe)
        case Induction():
            return InductionTask(probe)
        case SelectiveCopying():
            return SelectiveCopyingTask(probe)
        case Needle():
            return NeedleTask(probe)


def _blank(examples: int, context: int) -> Rows:
    """Return inputs of blanks, and targets that ask for nothing."""
    shape = (examples, context)
    return np.full(shape, BLANK, dtype=np.int64), np.full(shape, UNSCORED, dtype=np.int64)


def _look_up(row: Sequence[int], keys: range) -> list[int]:
    """Answer a key that is met again with the token that followed it the first time."""
    value: dict[int, int] = {}
    answers: list[int] = []
    for t, token in enumerate(row):
        if t and row[t - 1] in keys:
            value.setdefault(row[t - 1], token)
        answers.append(value.get(token, UNSCORED) if token in keys else UNSCORED)
    return answers
