"""Sampling from one row, and texts of several prompts at once, whole characters and stops included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tensorformer.config.schema import FeedForward, Layer, Model, SoftmaxAttention
from tensorformer.data.tokenizer import ByteTokenizer
from tensorformer.errors import ConfigError, DataError, DivergenceError
from tensorformer.lab.generate import Piece, generate, write_on
from tensorformer.lab.sampling import Sampler, sample
from tensorformer.lab.stop_text import StopText
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.state import SoftmaxState, State


class Scripted(TensorTransformer):
    """Goes on from the first letter that has a script with that script, then with the end for ever.

    What it has read is its state: the keys of a cache.
    """

    def __init__(self, scripts: dict[str, bytes]) -> None:
        mixer, ffn = SoftmaxAttention(n_heads=1, position="none"), FeedForward(gate="swiglu", d_ff=4)
        layers = (Layer(mixer="m", ffn="f"),)
        super().__init__(Model(d_model=4, n_layers=1, mixers={"m": mixer}, ffns={"f": ffn}, layers=layers))
        self.scripts = {ord(letter): text for letter, text in scripts.items()}

    def decode(self, tokens: Tensor, state: State, segments: Tensor | None = None) -> tuple[Tensor, State]:
        cache = cast(SoftmaxState, state[0])
        real = torch.ones_like(tokens) if segments is None else (segments >= 0).long()
        position = (cache.seen[:, None] + real.cumsum(1) - 1).masked_fill(real == 0, -1)
        read = tokens[:, None, :, None].expand(-1, 1, -1, 4).float()
        cache = cache.append(read, read, position)
        rows = [row[at >= 0].long().tolist() for row, at in zip(cache.k[:, 0, :, 0], cache.position, strict=True)]
        return torch.stack([self.next_of(row) for row in rows]), (cache,)

    def next_of(self, read: list[int]) -> Tensor:
        logits = torch.full((256,), -9.0)
        begin = next((i for i, t in enumerate(read) if t in self.scripts), None)
        if begin is None:  # only in the middle of a prompt
            return logits
        script, n = self.scripts[read[begin]], len(read) - begin - 1
        logits[script[n] if n < len(script) else 0] = 9.0
        return logits * (torch.nan if script[n : n + 1] == b"\xff" else 1)


SCRIPTS = {"A": "abc é→𝄞!".encode(), "B": b"one\ntwo\nthree", "C": b"x\xff", "D": b"half \xe2\x86"}


def written(prompts: list[str], n_tokens: int = 99, **options: Any) -> list[str]:
    """Return the texts, and fail unless each ends once."""
    model = Scripted(SCRIPTS)
    texts, ends = [""] * len(prompts), [0] * len(prompts)
    for piece in write_on(model, ByteTokenizer(), prompts, n_tokens, temperature=0, top_p=1, seed=0, **options):
        assert not ends[piece.prompt]
        texts[piece.prompt] += piece.text
        ends[piece.prompt] += piece.last
    assert ends == [1] * len(prompts)
    return texts


def test_texts_of_several_prompts_are_those_of_each() -> None:
    prompts = ["A", "long before B", "D", "B"]
    assert written(prompts) == ["abc é→𝄞!", "one\ntwo\nthree", "half \N{REPLACEMENT CHARACTER}", "one\ntwo\nthree"]
    assert written(prompts, 5) == ["abc \N{REPLACEMENT CHARACTER}", "one\nt", "half ", "one\nt"]
    assert written(prompts, 5) == [written([p], 5)[0] for p in prompts]


def test_a_text_ends_before_a_stop_and_the_others_go_on() -> None:
    assert written(["A", "B"], stop=["\n"]) == ["abc é→𝄞!", "one"]
    assert written(["A", "B"], stop=["three", "→", "zzz"]) == ["abc é", "one\ntwo\n"]
    assert written(["B"], stop=["threes"]) == ["one\ntwo\nthree"]
    assert written(["B"], n_tokens=3, stop=["e"]) == ["on"]


def test_texts_that_are_stopped_end_whole() -> None:
    asked = iter([False, False, True])
    assert written(["B", "A"], stop=["ne\nt"], stopped=lambda: next(asked)) == ["on", "ab"]


def test_a_prompt_whose_logits_are_not_finite_is_named_and_the_others_come_first() -> None:
    got: list[Piece] = []
    model = Scripted(SCRIPTS)
    texts = write_on(model, ByteTokenizer(), ["B", "C"], 99, temperature=0.7, top_p=0.9, seed=0)
    with pytest.raises(DivergenceError, match=r"prompt 2 ends here: .* not finite"):
        got.extend(texts)
    assert "".join(p.text for p in got if p.prompt == 0) == "one\ntwo\nthree"
    assert "".join(p.text for p in got if p.prompt == 1) == "x"
    with pytest.raises(DivergenceError):
        list(tokens_after(b"C"))


def test_what_is_wrong_is_said_before_the_first_piece() -> None:
    with pytest.raises(ConfigError, match="at least one character"):
        written(["A"], stop=["x", ""])
    with pytest.raises(DataError, match="byte 0"):
        written(["A\0"])
    model = Scripted(SCRIPTS)
    with pytest.raises(ConfigError, match="temperature"):
        write_on(model, ByteTokenizer(), ["A"], 3, temperature=-1, top_p=1, seed=0)


def tokens_after(prompt: bytes, stop: tuple[int, ...] = (0,), n: int = 99) -> Iterator[int]:
    model = Scripted(SCRIPTS)
    return generate(model, list(prompt), n, temperature=0, top_p=1, seed=0, stop=stop, vocab_size=256)


def test_any_of_several_tokens_stops() -> None:
    assert bytes(tokens_after(b"B")) == b"one\ntwo\nthree"
    assert bytes(tokens_after(b"B", stop=(0, ord("w"), 7))) == b"one\nt"
    assert bytes(tokens_after(b"B", n=2)) == b"on"


# sampling


@given(st.integers(0, 10), st.floats(0.05, 1.0), st.floats(0.3, 2.0))
def test_draws_come_from_the_nucleus_and_rows_do_not_depend_on_their_neighbours(
    seed: int, top_p: float, temperature: float
) -> None:
    logits = torch.randn(4, 37, generator=torch.Generator().manual_seed(seed)) * 3
    settings = [(temperature, top_p), (0.0, 1.0), (temperature / 2, 1.0), (temperature, 0.5)]
    together = sample(logits, [Sampler.seeded(t, p, seed) for t, p in settings])
    for row, (t, p), token in zip(logits, settings, together, strict=True):
        assert sample(row[None], [Sampler.seeded(t, p, seed)]) == [token]
        if t == 0:
            assert token == int(row.argmax())
        else:
            probabilities = (row.double() / t).softmax(0)
            assert probabilities[probabilities > probabilities[token]].sum() < p + 1e-6


def test_draws_have_the_model_s_probabilities() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -3.0]])
    sampler = Sampler.seeded(0.8, 1.0, 5)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sample(logits, [sampler])] += 1
    expected = (logits[0] / 0.8).softmax(0)
    assert (counts / 4000 - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


# stops


def cut(text: str, stops: list[str]) -> str:
    """Return the text before the first stop to be complete, read letter by letter."""
    for end in range(len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)]
    return text


@given(st.data())
def test_a_stop_is_found_whatever_the_pieces(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
    pieces = data.draw(st.lists(st.text("abc", max_size=4), max_size=8))
    stop = StopText(stops)
    given_out = ""
    for n, piece in enumerate(pieces):
        given_out += stop.push(piece)
        whole = "".join(pieces[: n + 1])
        longest = max(map(len, stops), default=1)
        assert cut(whole, stops).startswith(given_out)
        assert stop.found or len(whole) - len(given_out) < longest  # no more is held back than may be needed
    assert given_out + stop.finish() == cut("".join(pieces), stops)
    assert stop.found == any(s in "".join(pieces) for s in stops)


class Forgetful(StopText):
    """Looks for a stop in each piece alone."""

    def push(self, piece: str) -> str:
        return StopText.push(self, piece) + ("" if self.found else self.finish())


def test_a_stop_across_pieces_that_is_missed_is_caught() -> None:
    for kind, right in ((StopText, True), (Forgetful, False)):
        stop = kind(["ab"])
        text = stop.push("xa") + stop.push("bc") + stop.finish()
        assert (text == cut("xabc", ["ab"])) == right
