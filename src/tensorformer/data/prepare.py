"""Tokenise a corpus once, keep the tokens in a cache, and map them into memory.

The cache folder of a corpus is named after everything that decides its tokens: the text of every document in order, the
tokenizer and the shares. It is built beside and renamed, so it is whole or absent; two processes may build it at once
and the first to finish is used by both. Every opening checks the arrays against their SHA-256: reading the source to
find the name costs more than that.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import UInt

from tensorformer.config.check import check_shares
from tensorformer.config.schema import BPE, Bytes, Data, TokenizerFile
from tensorformer.data.corpus import Document, describe, documents
from tensorformer.data.split import PARTS, Part, part, place, position
from tensorformer.data.tokenizer import Tokenizer, load, load_tokenizer, read_model
from tensorformer.errors import DataError
from tensorformer.files import cache_folder, sha256

_FORMAT = 1  # rises when the same inputs give other tokens
_META = "meta.json"
_BATCH = 1 << 22  # characters tokenised in one call
_STALE = 86_400.0  # seconds after which an unfinished build is taken for dead


class TokenPart(msgspec.Struct, frozen=True, eq=False):
    """One part of a corpus: its documents one after another, an end-of-document token behind each."""

    tokens: UInt[np.ndarray, " tokens"]  # a read-only memory map of uint8, uint16 or uint32
    n_documents: int
    n_bytes: int  # of the documents' text as UTF-8, without their ends

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text a token stands for: bits per byte = nats per token / (ln 2 · bytes per token)."""
        return self.n_bytes / len(self.tokens)


class Corpus(msgspec.Struct, frozen=True, eq=False):
    """A tokenised corpus. Two corpora with the same fingerprint have the same tokens in the same order."""

    train: TokenPart
    validation: TokenPart
    tuning: TokenPart
    tokenizer: Tokenizer
    fingerprint: str
    source: str
    folder: Path

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the end of a document included."""
        return self.tokenizer.vocab_size


class _PartMeta(msgspec.Struct, frozen=True):
    n_tokens: int
    n_documents: int
    n_bytes: int
    sha256: str


class _Meta(msgspec.Struct, frozen=True):
    dtype: str
    parts: dict[Part, _PartMeta]
    fingerprint: str


def prepare(data: Data, cache: Path | None = None) -> Corpus:
    """Return the tokens of a corpus, from the cache if they are there.

    Args:
        data: the source, the tokenizer and the shares.
        cache: where token arrays are kept; None: ``$TENSORFORMER_CACHE``, ``$XDG_CACHE_HOME/tensorformer`` or
            ``~/.cache/tensorformer``.

    Raises:
        DataError: the source can't be read, a part gets no document, or the cache can't be written.
        ConfigError: the shares leave nothing to train on.
    """
    cache = cache_folder() if cache is None else cache
    key = _survey(data)
    folder = cache / key[:32]
    for _ in range(3):  # a second look if another process just replaced a damaged folder
        if corpus := _open(folder, describe(data)):
            return corpus
        _build(data, key, folder)
    raise DataError(f"{folder}: the token cache is damaged as often as it is written; set TENSORFORMER_CACHE elsewhere")


def _survey(data: Data) -> str:
    """Read the source once, check that every part gets a document, and hash all that decides the tokens."""
    check_shares(data)
    key = _Key(data)
    found: set[Part] = set()
    n, lowest, highest = 0, 1.0, 0.0
    for document in documents(data):
        n += 1
        key.add(document)
        at = position(document.text)
        lowest, highest = min(lowest, at), max(highest, at)
        found.add(place(at, data))
    for missing in PARTS:
        if missing not in found:
            raise DataError(_empty_part(missing, data, n, lowest, highest))
    return key.hexdigest()


def _empty_part(missing: Part, data: Data, n: int, lowest: float, highest: float) -> str:
    count = f"{n:,} document" + "s" * (n > 1)
    text = f"data.source {describe(data)} holds {count} and none falls into the {missing} part"
    share = np.floor((lowest if missing == "validation" else 1 - highest) * 100 + 1) / 100
    other = data.tuning if missing == "validation" else data.validation
    if missing == "train":
        return f"{text}: lower data.validation or data.tuning, or add documents"
    if n > 2 and share + other < 0.8:
        return f"{text}: set data.{missing} = {share:.2f} or add documents"
    return f"{text}: add documents, or name a text file itself in data.source, which cuts it into documents"


class _Key:
    """Hashes what decides the tokens of a corpus."""

    def __init__(self, data: Data) -> None:
        match data.tokenizer:
            case Bytes():
                spec = "bytes"
            case BPE(vocab_size=size):
                spec = f"bpe {size}"
            case TokenizerFile(end_of_document=end):
                spec = f"file {hashlib.sha256(read_model(data.tokenizer)).hexdigest()} {end}"
        self._hash = hashlib.sha256(f"{_FORMAT}\n{spec}\n{data.validation!r} {data.tuning!r}\n".encode())

    def add(self, document: Document) -> None:
        content = document.text.encode()
        self._hash.update(len(content).to_bytes(8, "little"))
        self._hash.update(content)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _open(folder: Path, source: str) -> Corpus | None:
    """Return the corpus in ``folder``, or None if it is absent or damaged."""
    try:
        meta = msgspec.json.decode((folder / _META).read_bytes(), type=_Meta)
        parts = {name: _map(folder / f"{name}.bin", meta.dtype, meta.parts[name]) for name in PARTS}
        tokenizer = load(folder)
    except (OSError, ValueError, KeyError, DataError):  # msgspec's errors are ValueErrors
        return None
    return Corpus(**parts, tokenizer=tokenizer, fingerprint=meta.fingerprint, source=source, folder=folder)


def _map(path: Path, dtype: str, meta: _PartMeta) -> TokenPart:
    tokens = np.memmap(path, dtype=dtype, mode="r")
    if tokens.shape != (meta.n_tokens,) or sha256(path) != meta.sha256:
        raise DataError(f"{path}: damaged")
    return TokenPart(tokens, meta.n_documents, meta.n_bytes)


def _build(data: Data, key: str, folder: Path) -> None:
    """Tokenise into a temporary folder beside ``folder``, then give it the name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            (new := beside / "new").mkdir()  # a temporary folder is private, one made in it is not
            _write(data, key, new)
            _publish(new, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        why = error.strerror or str(error)
        mend = "free some space or make it writable, or set TENSORFORMER_CACHE to another folder"
        raise DataError(f"{folder.parent}: the token cache can't be written ({why}); {mend}") from None


def _write(data: Data, key: str, folder: Path) -> None:
    tokenizer = load_tokenizer(data.tokenizer, (d.text for d in documents(data) if part(d.text, data) == "train"))
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    again = _Key(data)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_PartFile(folder / f"{name}.bin")) for name in PARTS}
        for batch in _batches(documents(data)):
            for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                again.add(document)
                tokenizer.refuse_end(ids, document.name)
                tokens = np.append(ids, tokenizer.end_of_document).astype(dtype)
                files[part(document.text, data)].append(tokens, len(document.text.encode()))
    if again.hexdigest() != key:
        raise DataError(f"data.source {describe(data)} changed while it was being read; start again when it rests")
    tokenizer.save(folder)
    parts: dict[Part, _PartMeta] = {name: files[name].meta() for name in PARTS}
    result = hashlib.sha256(repr((tokenizer.vocab_size, dtype.str, [parts[name].sha256 for name in PARTS])).encode())
    meta = _Meta(dtype.str, parts, result.hexdigest())
    (folder / _META).write_bytes(msgspec.json.encode(meta))


class _PartFile:
    """A token array on disk that grows by one document at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._tokens = self._documents = self._bytes = 0

    def __enter__(self) -> _PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, tokens: UInt[np.ndarray, " tokens"], n_bytes: int) -> None:
        content = tokens.tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._tokens += len(tokens)
        self._documents += 1
        self._bytes += n_bytes

    def meta(self) -> _PartMeta:
        return _PartMeta(self._tokens, self._documents, self._bytes, self._hash.hexdigest())


def _batches(source: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in source:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _publish(new: Path, folder: Path) -> None:
    """Rename a finished build; whatever is there already is kept if it is whole."""
    if _open(folder, "") is not None:
        return
    with contextlib.suppress(FileNotFoundError):  # to where the unfinished is removed
        folder.rename(new.with_name("damaged"))
    try:
        new.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise


def _remove_stale(folder: Path) -> None:
    """Remove builds of this corpus that a killed process left behind."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE:
                shutil.rmtree(left, ignore_errors=True)
