"""Which part of the corpus a document belongs to: a function of what it says, and of nothing else."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

from tensorformer.config.check import check_shares
from tensorformer.config.schema import Data

Part = Literal["train", "validation", "tuning"]
PARTS: tuple[Part, ...] = get_args(Part)


def position(text: str) -> float:
    """Return where a text falls in [0, 1): the first 53 bits of the SHA-256 of its UTF-8 bytes."""
    digest = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def part(text: str, data: Data) -> Part:
    """Assign a document to training, validation or tuning by its content.

    Identical documents share a part, adding documents moves none, and changing one share moves no document between the
    other two parts:  validation = [0, v),  tuning = [1 − t, 1),  train = what is left.

    Args:
        text: the whole document.
        data: the shares v (``validation``) and t (``tuning``).

    Raises:
        ConfigError: the two shares leave nothing to train on.
    """
    check_shares(data)
    return place(position(text), data)


def place(at: float, data: Data) -> Part:
    """Return the part whose share of [0, 1) holds ``at``."""
    if at < data.validation:
        return "validation"
    return "tuning" if at >= 1 - data.tuning else "train"
