"""The catalogue as a mapping that others can add to: by an entry point of the group ``tensorformer.gates``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, final

from tensorformer.errors import GateError, suggest
from tensorformer.gates.gate import Gate, Scalar

GROUP = "tensorformer.gates"
_LOADING = threading.RLock()
Entry = TypeVar("Entry", Scalar, Gate)


@final
class Catalogue(Mapping[str, Entry], Generic[Entry]):
    """Activations by name: iterates over names, finds aliases too, and answers an unknown name with the nearest.

    Args:
        kind: what it holds.
        entries: those of this package; those of installed packages are added when it is first looked into.

    Raises:
        GateError: two entries share a name or an alias.
    """

    def __init__(self, kind: type[Entry], entries: Iterable[Entry]) -> None:
        self._kind = kind
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}
        self._complete = self._loading = False
        for entry in entries:
            self._add(entry)

    def __getitem__(self, name: str) -> Entry:
        self._load()
        name = self._aliases.get(name, name)
        if name not in self._entries:
            raise GateError(f"unknown activation {name!r}{suggest(str(name), [*self._entries, *self._aliases])}")
        return self._entries[name]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except GateError:
            return default

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._entries)

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _add(self, entry: Entry) -> None:
        for name in (entry.name, *entry.aliases):
            if name in self._entries or name in self._aliases:
                raise GateError(f"there is an activation {name!r} already: choose another name")
        self._entries[entry.name] = entry
        self._aliases |= dict.fromkeys(entry.aliases, entry.name)

    def _load(self) -> None:
        if self._complete:
            return
        with _LOADING:
            # A package may look into the catalogue while it builds its own entries.
            if self._loading or self._complete:
                return
            self._loading = True
            try:
                for point in entry_points(group=GROUP):
                    self._load_point(point)
            finally:
                self._complete = True

    def _load_point(self, point: EntryPoint) -> None:
        try:
            for entry in [e for e in _entries_of(point) if isinstance(e, self._kind)]:
                self._add(entry)
        except Exception as e:
            # One broken package must not take every activation with it.
            text = " ".join(f"{type(e).__name__}: {e}".split())
            warnings.warn(f"the entry point {point.name!r} is left out from its fault on: {text}", stacklevel=3)


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo: tracing a look-up reads the
# entry points there and then.
Catalogue._load._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _entries_of(point: EntryPoint) -> list[Any]:
    loaded = point.load()
    found = [loaded] if isinstance(loaded, Scalar | Gate) else list(loaded)
    for entry in found:
        if not isinstance(entry, Scalar | Gate):
            raise GateError(f"{point.value} holds {entry!r}: it must be a Scalar, a Gate, or a sequence of them")
    return found
