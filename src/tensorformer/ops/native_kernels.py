"""Kernels in C++ by what they compute: found in the cache, or built and held to their laws; and how many threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import TypeVar

import torch

from tensorformer.errors import ConfigError
from tensorformer.gates import Scalar
from tensorformer.ops import native_build

C_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
K = TypeVar("K")
_REMEMBERED = 256
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    # The threads of an OpenMP team do not follow into a forked child, and a child that waits for them waits for ever.
    os.register_at_fork(after_in_child=_after_fork)


def threads() -> int:
    """Return how many threads a kernel may take here."""
    return 1 if _forked else torch.get_num_threads()


def build(
    library: native_build.Library,
    dtype: torch.dtype,
    open_: Callable[[native_build.Library, torch.dtype], K],
    hold_to_laws: Callable[[dict[torch.dtype, K]], None],
) -> K:
    """Return the kernels of a library for ``dtype``, compiled and held to its laws where that has not been done.

    Args:
        library: its place in the cache.
        dtype: a key of ``C_TYPES``.
        open_: finds the functions of one dtype in it.
        hold_to_laws: given those of every dtype, raises ConfigError where they break a law in ``dtype``.

    Raises:
        ConfigError: it can't be built, or breaks a law.
        StorageError: the cache can't be written.
    """
    with library.lock():
        laws = library.laws()
        if laws is None:
            library.build()
        kernels = {t: open_(library, t) for t in C_TYPES}
        if C_TYPES[dtype] not in (laws or ()):
            hold_to_laws(kernels)
            library.stamp(C_TYPES[dtype])
    return kernels[dtype]


def find(
    library: Callable[[], native_build.Library],
    dtype: torch.dtype,
    open_: Callable[[native_build.Library, torch.dtype], K],
) -> K | None:
    """Return kernels that were built before and met their laws in ``dtype``; builds nothing."""
    try:
        # Looked at first: printing a formula loads SymPy, which takes half a second.
        if native_build.why_not() is not None or not native_build.library_folder().is_dir():
            return None
        found = library()
        return open_(found, dtype) if C_TYPES[dtype] in (found.laws() or ()) else None
    except ConfigError:
        return None  # no C++ form, or nowhere to look: to ask is no fault


def numbers(scalars: Iterable[Scalar]) -> dict[str, float]:
    """Return the parameters that are in the formulas, by name, in the order a kernel takes them; all must be bound."""
    return {n: float(v) for s in scalars for n, v in zip(s._names, s._given, strict=True)}


def refuse(what: str, broken: Sequence[str], dtype: torch.dtype) -> None:
    """Raise where laws are broken.

    Raises:
        ConfigError: names the first of them.
    """
    if broken:
        text = f"{what} in {dtype}: {broken[0]}"
        raise ConfigError(f"{text}; write impl='fast', and report it with your compiler's version")


def remember(built: MutableMapping[Hashable, K | None], key: Hashable, kernels: K | None) -> None:
    """Keep kernels by their key, None for those not in the cache; new ones make it worth looking for others again."""
    if kernels is not None:
        for absent in [k for k, v in built.items() if v is None]:
            del built[absent]  # the library serves other numbers too
    if len(built) >= _REMEMBERED:
        built.pop(next(iter(built)), None)  # of a number that changes at every step, all but the last are of no use
    built[key] = kernels
