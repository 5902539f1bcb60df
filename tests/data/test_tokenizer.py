"""Tokenizers: round trips, training that repeats itself, decoding piece by piece, ends no text can spell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.config.schema import BPE, Bytes, TokenizerFile
from tensorformer.data.decoder import ContextDecoder
from tensorformer.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load, load_tokenizer
from tensorformer.errors import DataError

TEXTS = ["def f(x):\n    return x + 1\n" * 3, "naïve café\r\n", "snake 🐍 and 日本語", "the cat sat on the mat " * 20]
UNICODE = "a\r\n\tß é 日本語 🐍👩‍👩‍👧 \u2028  end "


def bpe(texts: list[str] = TEXTS, size: int = 300) -> Tokenizer:
    return load_tokenizer(BPE(vocab_size=size), texts)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that spells spaces as ▁ and drops the first: its decoder depends on what came before."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    model.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    model.train_from_iterator(["the cat sat on the mat and that was that"], trainer=trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    model.enable_truncation(4)
    model.enable_padding(length=32)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return path


def from_file(path: Path) -> Tokenizer:
    return load_tokenizer(TokenizerFile(path=str(path), end_of_document="</s>"), ())


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe()], ids=["bytes", "bpe"])
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    for sample in (text, UNICODE + text, text + END_OF_TEXT):
        ids = tokenizer.encode(sample)
        assert tokenizer.decode(ids) == sample
        assert tokenizer.end_of_document not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("which", ["bytes", "bpe", "file"])
@given(st.data())
def test_pieces_join_to_the_whole(sentencepiece_file: Path, which: str, data: st.DataObject) -> None:
    tokenizer = {"bytes": ByteTokenizer, "bpe": bpe, "file": lambda: from_file(sentencepiece_file)}[which]()
    text = data.draw(st.text(st.sampled_from("the cat é日🐍\n"), max_size=60))
    ids = tokenizer.encode(text).tolist()
    decoder = tokenizer.decoder()
    parts = [decoder.push(i) for i in [*ids[:3], tokenizer.end_of_document, *ids[3:]]]
    assert "".join(parts) + decoder.finish() == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe()], ids=["bytes", "bpe"])
@given(data=st.data())
def test_pieces_of_what_no_text_encodes_to(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """An untrained model writes broken UTF-8; the pieces still join to the decoding of the whole."""
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=80))
    decoder = tokenizer.decoder()
    assert "".join(decoder.push(i) for i in ids) + decoder.finish() == tokenizer.decode(ids)


def test_a_character_appears_when_its_last_byte_does() -> None:
    tokenizer = bpe(["plain ascii text"], 257)
    for decoder, ids in ((ByteTokenizer().decoder(), "é🐍".encode()), (tokenizer.decoder(), tokenizer.encode("é🐍"))):
        assert [decoder.push(int(i)) for i in ids] == ["", "é", "", "", "", "🐍"]


def test_decoding_looks_back_on_a_few_tokens_only(sentencepiece_file: Path) -> None:
    tokenizer = from_file(sentencepiece_file)
    lengths: list[int] = []

    def watched(ids: list[int]) -> str:
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    decoder = ContextDecoder(watched, skip=2)
    text = "the cat sat 日本🐍 " * 50
    assert "".join(decoder.push(int(token)) for token in tokenizer.encode(text)) == text
    assert max(lengths) <= 8


def test_training_repeats_itself_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tensorformer.config.schema import BPE;"
        "from tensorformer.data.tokenizer import load_tokenizer;"
        f"load_tokenizer(BPE(vocab_size=300), {TEXTS!r}).save(Path(sys.argv[1]))"
    )
    bpe().save(tmp_path / "here")
    for seed in ("1", "2"):
        there = tmp_path / seed
        subprocess.run([sys.executable, "-c", code, str(there)], check=True, env={"PYTHONHASHSEED": seed})
        assert (there / "tokenizer.json").read_bytes() == (tmp_path / "here/tokenizer.json").read_bytes()


def test_save_and_load(tmp_path: Path, sentencepiece_file: Path) -> None:
    for n, tokenizer in enumerate((ByteTokenizer(), bpe(), from_file(sentencepiece_file))):
        tokenizer.save(tmp_path / str(n))
        again = load(tmp_path / str(n))
        for text in (UNICODE, "the cat </s> " + END_OF_TEXT):
            assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert (again.vocab_size, again.end_of_document) == (tokenizer.vocab_size, tokenizer.end_of_document)
        assert again.description == tokenizer.description
    with pytest.raises(DataError, match="no tokenizer that can be read there"):
        load(tmp_path)


def test_a_vocabulary_smaller_than_asked_for_says_its_size() -> None:
    tokenizer = bpe(["ab ab"], 1_000)
    assert tokenizer.vocab_size < 300
    assert f"{tokenizer.vocab_size} tokens" in tokenizer.description


def test_a_file_is_used_without_padding_truncation_and_special_tokens(sentencepiece_file: Path) -> None:
    tokenizer = from_file(sentencepiece_file)
    ids = tokenizer.encode("the cat sat on the mat </s> the cat")
    assert len(ids) > 8
    assert not {0, 1, 2} & set(ids.tolist())
    assert tokenizer.decode(ids) == "the cat sat on the mat </s> the cat"
    assert tokenizer.end_of_document == 2


def test_a_text_that_spells_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains byte 0"):
        ByteTokenizer().encode("a\0b")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "the": 1, "<unk>": 2}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "t.json"))  # lists its end as an ordinary word
    tokenizer = load_tokenizer(TokenizerFile(path=str(tmp_path / "t.json"), end_of_document="<eos>"), ())
    assert tokenizer.encode("the the").tolist() == [1, 1]
    with pytest.raises(DataError, match="contains '<eos>', which ends a document here"):
        tokenizer.encode("the <eos> the")


def test_bad_tokenizer_files_are_named(tmp_path: Path, sentencepiece_file: Path) -> None:
    def error(path: Path, end: str = "</s>") -> str:
        with pytest.raises(DataError) as caught:
            load_tokenizer(TokenizerFile(path=str(path), end_of_document=end), ())
        return str(caught.value)

    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert "can't be read (No such file or directory); did you mean 'tokenizer.json'?" in error(
        tmp_path / "tokeniser.json"
    )
    assert "is a folder" in error(tmp_path)
    assert "not a tokenizer.json" in error(tmp_path / "tokenizer.json")
    assert "no token '<s/>' for data.tokenizer.end_of_document; did you mean" in error(sentencepiece_file, "<s/>")
    assert load_tokenizer(Bytes(), ()).vocab_size == 256
