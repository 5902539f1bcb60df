"""Files that are whole or absent: written beside, flushed, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tensorformer.errors import ConfigError, StorageError


def cache_folder() -> Path:
    """Return the folder for what can be made again: ``$TENSORFORMER_CACHE``, else one in the user's cache.

    Raises:
        ConfigError: there is no home folder.
    """
    if chosen := os.environ.get("TENSORFORMER_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).absolute() / "tensorformer"
    try:
        return Path.home() / ".cache" / "tensorformer"
    except RuntimeError:
        raise ConfigError("there is no home folder for a cache; set TENSORFORMER_CACHE to a folder") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on a clean exit it takes the name ``path``, else it is removed.

    Raises:
        StorageError: it can't be written.
    """
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        beside = Path(name)
        yield beside
        with beside.open("rb") as f:
            os.fsync(f.fileno())
        beside.chmod(0o644)
        beside.replace(path)
    except OSError as e:
        raise StorageError.at(path, e) from None
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` whole or not at all."""
    with replacing(path) as beside:
        beside.write_bytes(content)


def sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
