"""Text from tokens that arrive one at a time: never half a character, never all of it again."""

from __future__ import annotations

import abc
import codecs
import json
from collections.abc import Callable
from typing import final

import tokenizers

_HELD = 8  # tokens that may end inside a character before they are taken for broken UTF-8: a character has four bytes


class Decoder(abc.ABC):
    """Turns tokens into text piece by piece; the pieces and ``finish`` join to the text of all of them."""

    @abc.abstractmethod
    def push(self, token: int) -> str:
        """Take the next token and return the text that is now certain: never half a character, often nothing."""

    @abc.abstractmethod
    def finish(self) -> str:
        """Return what is still held back; an incomplete character becomes U+FFFD."""


@final
class Utf8Decoder(Decoder):
    """For tokens that stand for bytes, whatever surrounds them."""

    def __init__(self, to_bytes: Callable[[int], bytes]) -> None:
        self._to_bytes = to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._to_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


@final
class ContextDecoder(Decoder):
    """For tokens whose text depends on their neighbours: those since the last whole character but one are kept."""

    def __init__(self, decode: Callable[[list[int]], str], skip: int) -> None:
        self._decode = decode
        self._skip = skip  # a token without a text
        self._before: list[int] = []  # already returned; they begin and end at a whole character
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if token == self._skip:
            return ""
        self._held.append(token)
        if len(self._held) < _HELD and self._decode(self._before + self._held).endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self.finish()

    def finish(self) -> str:
        if not self._held:
            return ""
        text = self._decode(self._before + self._held)[len(self._decode(self._before)) :]
        self._before, self._held = self._held, []
        return text


def token_bytes(model: tokenizers.Tokenizer) -> Callable[[int], bytes] | None:
    """Return the bytes each token of a byte-level model stands for, or None if it has another kind of decoder."""
    decoder = json.loads(model.to_str())["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    printable = {
        *range(0x21, 0x7F),
        *range(0xA1, 0xAD),
        *range(0xAE, 0x100),
    }  # GPT-2's: these bytes stand for themselves
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}

    def to_bytes(token: int) -> bytes:
        text = model.id_to_token(token) or ""
        try:
            return bytes(byte_of[character] for character in text)
        except KeyError:  # an added token is written as it is
            return text.encode()

    return to_bytes
