"""Documents from where a recipe says the text is: the standard library, files, folders and globs.

What is one document:

* ``"stdlib"``: one module of the running Python's own standard library. A module that is empty, not UTF-8 or holds a
  NUL (a handful of Python's own test data) is left out.
* a ``.jsonl`` file: one line, its ``text_field``; blank lines and empty texts are left out.
* a text file *found* in a folder or by a glob: the file. Empty ones are left out.
* a text file *named* in the recipe: often the whole corpus, so it is cut at blank lines into documents of 1 to 16 kB
  (1/256 of the file, rounded down to a power of two), whose concatenation is the file.

A folder means every file below it except hidden ones and ``__pycache__``. Nothing else is left out in silence: a file
that is not UTF-8 text, or a named file that is empty, is an error. Line ends are kept; a byte-order mark is dropped.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import glob
import io
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from tensorformer.config.schema import Data
from tensorformer.errors import DataError, suggest

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_SMALLEST, _LARGEST, _PIECES = 1 << 10, 1 << 14, 256  # documents a named text file is cut into: bytes, bytes, about


class Document(msgspec.Struct, frozen=True):
    """A text that is never split between parts, and where it came from (a path, ``path@byte`` or ``path:line``)."""

    name: str
    text: str


def documents(data: Data) -> Iterator[Document]:
    """Yield the documents of ``data.source`` in an order that depends on names only.

    Args:
        data: where the text is; a relative path starts at the working directory, and a file met twice counts once.

    Yields:
        Documents with at least one character that is not white space.

    Raises:
        DataError: a path does not exist or can't be read, a file is binary or empty, a line is no JSON object with
            the field, or there is no text at all.
    """
    entries = (data.source,) if isinstance(data.source, str) else data.source
    seen: set[str] = set()
    empty = True
    for entry in entries:
        for document in _stdlib() if entry == STDLIB else _entry(entry, data.text_field, seen):
            empty = False
            yield document
    if empty:
        raise DataError(f"data.source {describe(data)} holds no text; name files, folders or globs that do")


def describe(data: Data) -> str:
    """Return ``data.source`` as a reader would write it."""
    return data.source if isinstance(data.source, str) else ", ".join(data.source)


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _below(root, skip=lambda name: name in _NOT_STDLIB, suffix=".py"):
        with _reading(path) as f:
            content = f.read()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        if "\0" not in text and not text.isspace() and text:
            yield Document(path.relative_to(root).as_posix(), text)


def _entry(entry: str, field: str, seen: set[str]) -> Iterator[Document]:
    path = Path(entry).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file, False where a folder on the way can't be searched
        found, named = [path], True
    elif os.path.isdir(path):
        found, named = _below(path, skip=lambda name: name.startswith(".") or name == "__pycache__"), False
    elif os.path.exists(path):
        raise DataError(f"{entry}: neither a file nor a folder; data.source reads text files, folders and globs")
    elif glob.has_magic(entry):
        found, named = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if os.path.isfile(p)), False
    else:
        raise DataError(_missing(path, entry))
    if not found:
        what = "the folder holds no files" if os.path.isdir(path) else f"no file matches, seen from {Path.cwd()}"
        raise DataError(f"data.source {entry!r}: {what}; give a path to text or .jsonl files")
    for file in found:
        if (real := str(file.resolve())) in seen:
            continue
        seen.add(real)
        count = 0
        for document in _file(file, field, cut=named):
            count += 1
            yield document
        if named and not count:
            raise DataError(f"{file}: the file is empty; give one with text, or leave it out of data.source")


def _missing(path: Path, entry: str) -> str:
    parent = path.parent
    if not os.path.isdir(parent):
        return f"data.source {entry!r} does not exist: there is no folder {parent}, seen from {Path.cwd()}"
    try:
        names = [*os.listdir(parent), *([STDLIB] if str(parent) == "." else [])]
    except OSError:
        names = []
    near = suggest(path.name, near) if (near := difflib.get_close_matches(path.name, names)) else ""
    return f"data.source {entry!r} does not exist in {parent.resolve()}{near}"


def _below(root: Path, skip: Callable[[str], bool], suffix: str = "") -> list[Path]:
    """Return the files below ``root``, ordered by their path's parts; links to folders are not followed."""
    files = []
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if not skip(name)]
        files += [Path(folder, name) for name in names if name.endswith(suffix) and not skip(name)]
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _file(path: Path, field: str, cut: bool) -> Iterator[Document]:
    with _reading(path) as f:
        if path.suffix.lower() == ".jsonl":
            yield from _lines(path, f, field)
            return
        size = os.fstat(f.fileno()).st_size
        start = 0
        for piece in pieces(f, size) if cut else [f.read()]:
            text = _checked(piece, path, start)
            name = f"{path}@{start}" if cut and len(piece) < size else str(path)
            start += len(piece)
            if text and not text.isspace():
                yield Document(name, text)


def pieces(file: io.BufferedIOBase, size: int) -> Iterator[bytes]:
    """Cut a file of ``size`` bytes into documents.

    A document ends at the first blank line past the target; failing that, past twice the target, at a line's end; and
    past four times the target, after any character. The target is ``size / 256`` rounded down to a power of two, within
    1 and 16 kB: appending to a file moves a cut only when its size passes a power of two.

    Yields:
        Pieces whose concatenation is the file.
    """
    target = min(max(1 << max(size // _PIECES, 1).bit_length() - 1, _SMALLEST), _LARGEST)
    held = bytearray()
    while line := file.readline(target):
        held += line
        whole = line.endswith(b"\n")
        at_blank = whole and not line.strip() and len(held) >= target
        if at_blank or (whole and len(held) >= 2 * target) or len(held) >= 4 * target:
            end = len(held)
            if not whole:  # leave the last character, which may not be complete, to the next document
                end -= 1
                while end > 1 and held[end] & 0xC0 == 0x80:
                    end -= 1
            yield bytes(held[:end])
            del held[:end]
    if held:
        yield bytes(held)


def _lines(path: Path, file: io.BufferedIOBase, field: str) -> Iterator[Document]:
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: not JSON ({error}); a .jsonl file holds one JSON object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: a {type(record).__name__}, not a JSON object with the field {field!r}")
        if field not in record:
            raise DataError(f"{where}: no field {field!r}; set data.text_field{suggest(field, record)}")
        text = record[field]
        if not isinstance(text, str):
            raise DataError(f"{where}: field {field!r} holds a {type(text).__name__}, not text; set data.text_field")
        if text and not text.isspace():
            yield Document(where, text)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: can't be read ({error.strerror}); make it readable, or leave it out") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a source file; what goes wrong while reading it is the file's fault, not the cache's."""
    try:
        with path.open("rb") as f:
            yield f
    except OSError as error:
        _unreadable(error)


def _checked(content: bytes, path: Path, start: int) -> str:
    """Decode part of a user's file, which begins at byte ``start`` of it."""
    mend = "convert it to UTF-8 text, or leave it out of data.source (a glob such as 'folder/**/*.txt' picks files)"
    if (at := content.find(b"\0")) >= 0:
        raise DataError(f"{path}: a binary file (byte 0 at offset {start + at}); {mend}")
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {content[error.start]:#04x} at offset {start + error.start}"
        raise DataError(f"{path}: not UTF-8 text ({at}); {mend}") from None
