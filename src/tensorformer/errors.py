"""The errors a user is meant to read: one line that says what was wrong, where, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TensorformerError(Exception):
    """Base of every error that is the input's fault; the command line prints it as one line and exits with 1."""


class ConfigError(TensorformerError):
    """A recipe or an argument asks for something that does not exist or can't be built."""


class DataError(TensorformerError):
    """A corpus or tokenizer file is missing, empty, binary or too short."""


class CheckpointError(TensorformerError):
    """A run folder or checkpoint is damaged, or belongs to another configuration."""


class StorageError(TensorformerError, OSError):
    """A file can't be written: the disk is full, or the folder is not ours to write."""

    @classmethod
    def at(cls, path: object, error: OSError) -> StorageError:
        """Return the error for ``path``, with the mend."""
        return cls(f"{path}: can't be written ({error.strerror or error}); free some space or choose another folder")


class DivergenceError(TensorformerError):
    """Training or decoding met a loss, gradient or logits that are not finite."""


class GateError(ConfigError, ValueError):
    """A gate is unknown, or a parameter of one is missing or out of range."""


class ShapeError(TensorformerError, ValueError):
    """Operands of an operator do not fit together."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known names, or the whole list where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "; known: " + ", ".join(known) if known else ""
