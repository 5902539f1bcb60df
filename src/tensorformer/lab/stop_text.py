"""Ending a text before some words, while it comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from tensorformer.errors import ConfigError


class StopText:
    """Gives out a text up to the first of some stops to be complete; the pieces it comes in do not matter.

    Args:
        stops: each of at least one character; none: the whole text is given out.

    Raises:
        ConfigError: a stop is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ConfigError("a text to stop at is empty; write at least one character")
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Take the next piece and return the text of which no stop can be a part any more."""
        if self.found:
            return ""
        self._held += piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(ends)
        certain = min(ends)[1] if ends else len(self._held) - self._begun()
        text, self._held = self._held[:certain], "" if self.found else self._held[certain:]
        return text

    def finish(self) -> str:
        """Return what is still held back."""
        text, self._held = self._held, ""
        return text

    def _begun(self) -> int:
        """Return how many of the last characters may be the beginning of a stop."""
        most = max((len(stop) - 1 for stop in self._stops), default=0)
        for n in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0
