"""Text to tokens and back: bytes, byte-pair encoding trained here, or any ``tokenizer.json``.

No text can spell the token that ends a document. Special tokens are matched nowhere: a document that *says*
``<|endoftext|>`` is encoded letter by letter, and a text that a tokenizer would still turn into its end-of-document
token (a byte 0; a ``tokenizer.json`` that lists the token as an ordinary word) is refused.
"""

from __future__ import annotations

import abc
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, SupportsIndex, final

import msgspec
import numpy as np
import tokenizers
from jaxtyping import Int64

from tensorformer.config.schema import BPE, Bytes, TokenizerFile
from tensorformer.data.decoder import ContextDecoder, Decoder, Utf8Decoder, token_bytes
from tensorformer.errors import DataError, suggest
from tensorformer.files import write_bytes, write_text

END_OF_TEXT = "<|endoftext|>"  # the special token of a BPE trained here
_ABOUT, _MODEL = "tokenizer_kind.json", "tokenizer.json"


class _About(msgspec.Struct, frozen=True):
    kind: Literal["bytes", "subword"]
    description: str
    end_of_document: str | None = None  # of subwords: the token's text


class Tokenizer(abc.ABC):
    """A fixed vocabulary of ``vocab_size`` tokens, one of which, ``end_of_document``, no text can spell."""

    vocab_size: int
    end_of_document: int
    description: str

    def encode(self, text: str) -> Int64[np.ndarray, " tokens"]:
        """Return the tokens of a text, without an end of document.

        Raises:
            DataError: the text would spell the end of a document.
        """
        ids = self.encode_batch([text])[0]
        self.refuse_end(ids, "the text")
        return ids

    def refuse_end(self, ids: Int64[np.ndarray, " tokens"], where: str) -> None:
        """Raise a DataError that names ``where`` if the tokens of a text hold the end of a document."""
        if (ids == self.end_of_document).any():
            raise DataError(f"{where} contains {self._end_text()}; take it out of the text, or use another tokenizer")

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Int64[np.ndarray, " tokens"]]:
        """Return the tokens of each text, unchecked."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of some tokens; an end of document has none, and broken UTF-8 becomes U+FFFD."""

    @abc.abstractmethod
    def decoder(self) -> Decoder:
        """Return a decoder for tokens that arrive one at a time."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Write the tokenizer into ``folder``, from where ``load`` reads it."""

    @abc.abstractmethod
    def _end_text(self) -> str: ...


@final
class ByteTokenizer(Tokenizer):
    """One token a UTF-8 byte; byte 0, which no text may contain, ends a document."""

    vocab_size = 256
    end_of_document = 0
    description = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[Int64[np.ndarray, " tokens"]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return bytes(i for i in map(int, ids) if i != self.end_of_document).decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        return Utf8Decoder(lambda token: bytes([token] if token != self.end_of_document else []))

    def save(self, folder: Path) -> None:
        _write_about(folder, _About("bytes", self.description))

    def _end_text(self) -> str:
        return "byte 0, which ends a document here"


@final
class SubwordTokenizer(Tokenizer):
    """A ``tokenizers`` model; padding, truncation and special tokens, which only dialogues need, are off."""

    def __init__(self, model: tokenizers.Tokenizer, end_of_document: str, description: str) -> None:
        vocabulary = model.get_vocab(with_added_tokens=True)
        if end_of_document not in vocabulary:
            near = difflib.get_close_matches(end_of_document, vocabulary, n=3, cutoff=0.5)
            special = [token.content for token in model.get_added_tokens_decoder().values() if token.special]
            hint = suggest(end_of_document, near or special[:12])
            raise DataError(f"{description}: no token {end_of_document!r} for data.tokenizer.end_of_document{hint}")
        model.no_padding()
        model.no_truncation()
        model.encode_special_tokens = True  # that is: spell them, do not match them
        self._model = model
        self._end = end_of_document
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes
        self.end_of_document = vocabulary[end_of_document]
        self.description = description

    def encode_batch(self, texts: Sequence[str]) -> list[Int64[np.ndarray, " tokens"]]:
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        kept = [i for i in map(int, ids) if i != self.end_of_document]
        return self._model.decode(kept, skip_special_tokens=False)

    def decoder(self) -> Decoder:
        to_bytes = token_bytes(self._model)
        if to_bytes is None:
            return ContextDecoder(self.decode, skip=self.end_of_document)
        return Utf8Decoder(lambda token: to_bytes(token) if token != self.end_of_document else b"")

    def save(self, folder: Path) -> None:
        write_text(folder / _MODEL, self._model.to_str())
        _write_about(folder, _About("subword", self.description, self._end))

    def _end_text(self) -> str:
        return f"{self._end!r}, which ends a document here"


def load_tokenizer(config: Bytes | BPE | TokenizerFile, texts: Iterable[str]) -> Tokenizer:
    """Make the tokenizer a recipe asks for.

    Args:
        config: which one.
        texts: the training documents, read only to train a BPE; the same texts give the same tokenizer.

    Returns:
        The tokenizer. A BPE may have fewer tokens than asked for when the text has no more pairs to merge.

    Raises:
        DataError: a tokenizer file is missing, damaged or lacks the end-of-document token.
    """
    match config:
        case Bytes():
            return ByteTokenizer()
        case BPE():
            return _train(config.vocab_size, texts)
        case TokenizerFile():
            content = read_model(config).decode("utf-8", errors="replace")
            return SubwordTokenizer(_parse(content, config.path), config.end_of_document, config.path)


def read_model(config: TokenizerFile) -> bytes:
    """Return the bytes of the tokenizer file a recipe names, or say why they can't be read."""
    path = Path(config.path).expanduser()
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise DataError(f"data.tokenizer.path {config.path!r} is a folder; name the tokenizer.json in it") from None
    except OSError as error:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings)
        hint = suggest(path.name, near) if near else ""
        raise DataError(f"data.tokenizer.path {config.path!r} can't be read ({error.strerror}){hint}") from None


def load(folder: Path) -> Tokenizer:
    """Read the tokenizer that ``save`` wrote into ``folder``.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_About)
        if about.kind == "bytes":
            return ByteTokenizer()
        content = (folder / _MODEL).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no tokenizer that can be read there ({error}); save one again") from None
    return SubwordTokenizer(_parse(content, folder / _MODEL), about.end_of_document or "", about.description)


def _train(vocab_size: int, texts: Iterable[str]) -> SubwordTokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer=trainer)
    return SubwordTokenizer(model, END_OF_TEXT, f"bpe, {model.get_vocab_size():,} tokens")


def _parse(content: str, path: str | Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the binding raises nothing narrower
        raise DataError(f"{path}: not a tokenizer.json ({error}); give one that `tokenizers` can read") from None


def _write_about(folder: Path, about: _About) -> None:
    write_bytes(folder / _ABOUT, msgspec.json.encode(about))
