"""Rewinding is never having gone on, saved and loaded is going on, rows can be reordered; broken ways are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from tensorformer.config.schema import Model
from tensorformer.errors import CheckpointError, ConfigError, ShapeError, StorageError
from tensorformer.lab import decoding, saved_state
from tensorformer.lab.decoding import Decoder
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.state import tensors
from tests.lab.decoding_models import every_model, model, some_models, tokens


def same(a: Decoder, b: Decoder) -> None:
    """Fail unless two decoders are, bit for bit, in one state, and go on alike."""
    assert a.batch == b.batch
    x, y = tensors(a.state), tensors(b.state)
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)
    assert (a.logits is None) == (b.logits is None)
    if a.logits is not None and b.logits is not None:
        assert torch.equal(a.logits, b.logits)
    for following in (tokens(a.batch, 1, seed=91), tokens(a.batch, 4, seed=92)):
        assert torch.equal(a.feed(following), b.feed(following))


def check_rewinding(name: str, feeds: list[int], back: int, piece: int = 4) -> None:
    """Fail unless going on and rewinding by ``back`` is as if that had never been fed."""
    text = tokens(2, sum(feeds))
    gone, stayed = (Decoder(model(name), 2, piece=piece, ring=99) for _ in range(2))
    at, left = 0, sum(feeds) - back
    for n in feeds:
        gone.feed(text[:, at : at + n])
        if left > 0:
            stayed.feed(text[:, at : at + min(n, left)])
        at, left = at + n, left - n
    gone.rewind(back)
    same(gone, stayed)


@every_model
def test_rewinding_is_never_having_gone_on(name: str) -> None:
    feeds = [3, 1, 6, 1, 1]
    for back in (0, 1, 2, 4, 7, 9, 12):
        check_rewinding(name, feeds, back)


@some_models
@settings(max_examples=5)
@given(data=st.data())
def test_rewinding_any_feeds_by_any_steps(name: str, data: st.DataObject) -> None:
    feeds = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    check_rewinding(name, feeds, data.draw(st.integers(0, sum(feeds))), data.draw(st.integers(1, 9)))


@some_models
def test_a_draft_that_is_rewound_again_and_again_leaves_nothing_behind(name: str) -> None:
    text, drafting, plain = tokens(1, 8), Decoder(model(name)), Decoder(model(name))
    for t in range(8):
        drafting.feed(tokens(1, 3, seed=t))
        drafting.rewind(2)
        drafting.rewind(1)
        drafting.feed(text[:, t : t + 1])
        plain.feed(text[:, t : t + 1])
    same(drafting, plain)


@every_model
def test_rows_of_different_length_and_rows_that_pause(name: str) -> None:
    real = torch.tensor([[False, True, True, True, True, True], [True, True, False, False, True, False]])
    text = tokens(2, 6)
    decoder = Decoder(model(name), 2, piece=2)
    logits = decoder.feed(text, real)
    for i in range(2):
        alone = Decoder(model(name)).feed(text[i : i + 1, real[i]])
        torch.testing.assert_close(logits[i], alone[0], rtol=1e-10, atol=1e-10)
    decoder.feed(text[:, :1], torch.tensor([[False], [True]]))
    assert decoder.logits is not None
    torch.testing.assert_close(decoder.logits[0], logits[0], rtol=1e-10, atol=1e-10)
    decoder.rewind(4)
    again = Decoder(model(name), 2, piece=2)
    again.feed(text[:, :3], real[:, :3])
    same(decoder, again)


@some_models
def test_beams_that_are_reordered_keep_their_histories(name: str) -> None:
    text = tokens(3, 6)
    decoder = Decoder(model(name), 3, piece=3)
    decoder.feed(text[:, :5])
    decoder.reorder([2, 0, 0, 1])
    decoder.feed(text[[2, 0, 0, 1], 5:])
    decoder.reorder([3, 1])
    chosen = text[[1, 0]]
    torch.testing.assert_close(decoder.logits, model(name)(chosen)[:, -1], rtol=1e-10, atol=1e-10)
    decoder.rewind(4)
    torch.testing.assert_close(decoder.logits, model(name)(chosen[:, :2])[:, -1], rtol=1e-10, atol=1e-10)
    logits = decoder.feed(chosen[:, 2:4])
    torch.testing.assert_close(logits, model(name)(chosen[:, :4])[:, -1], rtol=1e-10, atol=1e-10)
    assert decoder.batch == 2
    decoder.rewind(4)
    assert decoder.logits is None


@every_model
def test_saved_and_loaded_is_going_on(name: str, tmp_path: Path) -> None:
    decoder = Decoder(model(name), 2)
    file = tmp_path / "new" / "state.safetensors"
    decoder.save(file)
    same(Decoder.load(file, model(name)), Decoder(model(name), 2))
    decoder.feed(tokens(2, 7))
    decoder.save(file)
    loaded = Decoder.load(file, model(name))
    assert loaded.rewindable == 0
    same(loaded, decoder)


def test_the_ring_says_how_far_it_reaches() -> None:
    decoder = Decoder(model("gdn"), ring=3)
    for n in (5, 1, 2, 1):
        decoder.feed(tokens(1, n))
    assert decoder.rewindable == 4
    for n in (5, 9, -1):
        with pytest.raises(ConfigError, match=f"can't rewind {n} steps: .* holds the last 4"):
            decoder.rewind(n)
    decoder.rewind(4)
    assert decoder.rewindable == 0
    never = Decoder(model("gdn"), ring=0)
    never.feed(tokens(1, 2))
    with pytest.raises(ConfigError, match="holds the last 0"):
        never.rewind(1)


def test_a_long_feed_counts_once_for_each_piece() -> None:
    decoder = Decoder(model("bilinear"), ring=2, piece=3)
    decoder.feed(tokens(1, 8))
    assert decoder.rewindable == 5


@pytest.mark.parametrize("argument", [{"batch": 0}, {"ring": -1}, {"piece": 0}])
def test_sizes_out_of_range_are_refused(argument: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(argument))} .* or more"):
        Decoder(model("bilinear"), **argument)


def test_rows_that_are_not_there_are_refused() -> None:
    decoder = Decoder(model("bilinear"), 2)
    for shape in ((1, 3), (3, 1), (2, 0)):
        with pytest.raises(ShapeError, match="this decoder needs \\[2, 1 or more\\]"):
            decoder.feed(tokens(*shape))
    for rows in ([], [2], [-1]):
        with pytest.raises(ShapeError, match="name one or more of 0 to 1"):
            decoder.reorder(rows)
    same(decoder, Decoder(model("bilinear"), 2))


def other(change: dict[str, Any]) -> TensorTransformer:
    config = msgspec.to_builtins(model("gdn").config)
    for path, value in change.items():
        *where, last = path.split(".")
        table: Any = config
        for key in where:
            table = table[key]
        table[last] = value
    return TensorTransformer(msgspec.convert(config, Model)).double()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_model": 10}, "d_model = 8; [+] d_model = 10"),
        ({"mixers.gdn.preset": "kda"}, 'preset = "gdn"; [+] preset = "kda"'),
        ({"mixers.gdn.allow_neg_eigval": True}, "allow_neg_eigval"),
        ({"n_layers": 3}, "n_layers = 2; [+] n_layers = 3"),
        ({}, "other weights"),
    ],
)
def test_a_state_of_another_model_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    Decoder(model("gdn")).save(tmp_path / "s")
    with pytest.raises(CheckpointError, match=words):
        Decoder.load(tmp_path / "s", other(change))


def test_files_that_are_no_state_are_refused(tmp_path: Path) -> None:
    net, file = model("gdn"), tmp_path / "s"
    decoder = Decoder(net)
    decoder.feed(tokens(1, 3))
    decoder.save(file)
    about = {
        saved_state.CONFIG: msgspec.json.encode(net.config).decode(),
        saved_state.WEIGHTS: saved_state.fingerprint(net),
    }
    parts = load_file(file)

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            Decoder.load(file, net)

    file.write_bytes(file.read_bytes()[:-8])
    refused("can't be read")
    save_file({k: v for k, v in parts.items() if k != "1.memory"}, file, about)
    refused("1.memory")
    save_file({**parts, "2.memory": torch.zeros(1)}, file, about)
    refused("2.memory")
    save_file(parts, file)
    refused("not a saved state")
    save_file(parts, file, about | {saved_state.CONFIG: "{}"})
    refused("not a saved state")
    file.unlink()
    refused("can't be read")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(StorageError, match="can't be written"):
        Decoder(model("gdn")).save(tmp_path / "f" / "s")


# what must be caught


def breaks(name: str, feeds: list[int], back: int) -> bool:
    try:
        check_rewinding(name, feeds, back)
    except (AssertionError, RuntimeError):
        return True
    return False


@some_models
def test_a_cache_that_is_rewound_without_its_linear_state_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another library once did: the softmax layers go back, the linear ones stay; and the other way round."""
    rewind = Decoder.rewind

    def half(kept: str) -> Any:
        def rewound(self: Decoder, n: int) -> None:
            ahead = self.state
            rewind(self, n)
            pairs = zip(ahead, self.state, strict=True)
            self.state = tuple(a if type(a).__name__ == kept else b for a, b in pairs)

        return rewound

    caught = []
    for kept in ("LinearState", "SoftmaxState"):
        monkeypatch.setattr(Decoder, "rewind", half(kept))
        caught.append(breaks(name, [3, 1, 1], 1))
    kinds = {type(s).__name__ for s in model(name).initial_state(1)}
    assert caught == [kind in kinds for kind in ("LinearState", "SoftmaxState")]


def test_a_convolution_that_is_not_rewound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rewind = Decoder.rewind

    def forgetful(self: Decoder, n: int) -> None:
        ahead = self.state
        rewind(self, n)
        pairs: Any = zip(ahead, self.state, strict=True)
        self.state = tuple(b._replace(convolution=a.convolution) for a, b in pairs)

    monkeypatch.setattr(Decoder, "rewind", forgetful)
    assert breaks("gdn", [3, 1, 1], 1)


def test_a_piece_that_is_rewound_whole_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: Decoder, n: int) -> None:
        last = self._ring.pop()
        self.state, self.logits = last.state, last.logits

    monkeypatch.setattr(Decoder, "rewind", whole)
    assert not breaks("gdn", [3, 3], 3)
    assert breaks("gdn", [3, 3], 2)


def test_a_state_that_is_written_into_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = decoding.advance

    def in_place(model: TensorTransformer, part: Tensor, real: Any, state: Any, logits: Any) -> Any:
        out, after = advance(model, part, real, state, logits)
        for old, new in zip(state, after, strict=True):
            old[0].copy_(new[0])
        return out, after

    monkeypatch.setattr(decoding, "advance", in_place)
    assert breaks("bilinear", [3, 1, 1], 1)


def test_a_buffer_that_is_used_again_changes_nothing() -> None:
    text = tokens(1, 6)
    decoder, other = Decoder(model("softmax")), Decoder(model("softmax"))
    buffer = text.clone()
    decoder.feed(buffer)
    buffer.zero_()
    decoder.rewind(3)
    other.feed(text[:, :3])
    same(decoder, other)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    decoder = Decoder(model("softmax"))
    with pytest.raises(ConfigError, match="there is token -1; the model knows 0 to"):
        decoder.feed(torch.tensor([[0, -1]]))
