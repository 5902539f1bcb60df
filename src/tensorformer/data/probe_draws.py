"""Random numbers by index: an example's draws depend on its stream and its number, on nothing drawn before it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64, UInt64

RawDraws = UInt64[np.ndarray, "examples draws"]


class Draws:
    """Raw 64-bit numbers, one row an example, taken from the left.

    numpy keeps the raw bits of a bit generator the same for ever; what it makes of them may change, so that is done
    here.

    Args:
        raw: the numbers.
    """

    def __init__(self, raw: RawDraws) -> None:
        self._raw, self._taken = raw, 0

    @property
    def examples(self) -> int:
        """Number of rows."""
        return len(self._raw)

    @property
    def left(self) -> int:
        """Numbers a row that nobody took."""
        return self._raw.shape[1] - self._taken

    def integers(self, n: int, below: int) -> Int64[np.ndarray, "examples n"]:
        """Return n numbers a row from 0 to ``below`` − 1, evenly but for below / 2^64."""
        return (self._take(n) % np.uint64(below)).astype(np.int64)

    def shares(self, n: int) -> Float64[np.ndarray, "examples n"]:
        """Return n numbers a row in [0, 1), 53 bits each."""
        return (self._take(n) >> np.uint64(11)) * 2.0**-53

    def arrangement(self, n: int) -> Int64[np.ndarray, "examples n"]:
        """Return the numbers 0 to n − 1 in random order, a row each."""
        return np.argsort(self._take(n), axis=1, kind="stable")

    def ranking(self, weights: Float64[np.ndarray, " n"]) -> Int64[np.ndarray, "examples n"]:
        """Return 0 to n − 1 in the order in which they are drawn without replacement, by their weights.

        An exponential race: −ln(1 − u) / w arrives first with probability w / Σ w, again among those that are left.
        """
        return np.argsort(-np.log1p(-self.shares(len(weights))) / weights, axis=1, kind="stable")

    def _take(self, n: int) -> UInt64[np.ndarray, "examples n"]:
        if n > self.left:
            raise ValueError(f"{n} numbers asked for, {self.left} are left")
        self._taken += n
        return self._raw[:, self._taken - n : self._taken]


def draw(stream: tuple[int, ...], first: int, examples: int, each: int) -> Draws:
    """Return the draws of ``examples`` successive examples.

    Args:
        stream: names the sequence that they are part of.
        first: number of the first example, from 0.
        examples: how many.
        each: numbers an example; another count is another sequence.
    """
    bits = np.random.PCG64(np.random.SeedSequence(stream))
    bits.advance(first * each)
    return Draws(np.asarray(bits.random_raw(examples * each), dtype=np.uint64).reshape(examples, each))
