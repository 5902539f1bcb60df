"""The token cache: whole or absent, found again, rebuilt when damaged, and honest about what it can't do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensorformer.data.prepare as module
from tensorformer.config.schema import BPE, Bytes, Data, TokenizerFile
from tensorformer.data.corpus import documents
from tensorformer.data.prepare import Corpus, TokenPart, prepare
from tensorformer.data.split import PARTS, part
from tensorformer.errors import ConfigError, DataError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sixty documents; two say the same, one is full of what is special elsewhere."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(
            f"document {min(i, 58)} says the cat sat on the mat\r\n🐍 <|endoftext|>\n" * 3
        )
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


BYTES = Bytes()


def data(
    source: Path, tokenizer: Bytes | BPE | TokenizerFile = BYTES, validation: float = 0.3, tuning: float = 0.2
) -> Data:
    return Data(source=str(source), tokenizer=tokenizer, validation=validation, tuning=tuning)


def texts_of(corpus: Corpus, which: TokenPart) -> list[str]:
    ends = np.flatnonzero(which.tokens == corpus.tokenizer.end_of_document)
    return [corpus.tokenizer.decode(ids) for ids in np.split(which.tokens, ends + 1)[:-1]]


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE(vocab_size=300)])
def test_the_parts_hold_the_documents(source: Path, cache: Path, tokenizer: Bytes | BPE) -> None:
    config = data(source, tokenizer)
    corpus = prepare(config, cache)
    for name in PARTS:
        held: TokenPart = getattr(corpus, name)
        expected = [d.text for d in documents(config) if part(d.text, config) == name]
        assert texts_of(corpus, held) == expected
        assert held.n_documents == len(expected) > 0
        assert held.n_bytes == sum(len(text.encode()) for text in expected)
        assert isinstance(held.tokens, np.memmap)
        assert not held.tokens.flags.writeable
        assert held.tokens.dtype == (np.uint8 if tokenizer == Bytes() else np.uint16)
        assert held.tokens[-1] == corpus.tokenizer.end_of_document
        assert held.bytes_per_token == held.n_bytes / len(held.tokens)
    assert corpus.vocab_size == corpus.tokenizer.vocab_size
    assert corpus.source == str(source)
    assert not set(texts_of(corpus, corpus.train)) & set(texts_of(corpus, corpus.validation))


def test_the_second_time_it_is_read_from_the_cache(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(data(source), cache)
    moved = source.rename(source.with_name("moved"))
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    again = prepare(data(moved), cache)
    assert (again.fingerprint, again.folder) == (first.fingerprint, first.folder)
    assert again.source == str(moved)
    assert np.array_equal(again.train.tokens, first.train.tokens)


def test_the_fingerprint_follows_the_tokens(source: Path, cache: Path) -> None:
    seen = {prepare(data(source), cache).fingerprint}
    seen.add(prepare(data(source, BPE(vocab_size=300)), cache).fingerprint)
    seen.add(prepare(data(source, tuning=0.25), cache).fingerprint)
    file = source / "07.txt"
    times = file.stat()
    file.write_text(file.read_text().replace("cat", "dog"))  # same size
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    seen.add(prepare(data(source), cache).fingerprint)
    assert len(seen) == 4


def test_bpe_is_trained_on_training_documents_only(source: Path, cache: Path) -> None:
    config = data(source, BPE(vocab_size=400))
    before = prepare(config, cache)
    for document in documents(config):
        if part(document.text, config) != "train":
            Path(document.name).unlink()
    for n in range(40):  # other text to validate on, with a word that is easy to learn
        text = f"{n} xyzzy xyzzy xyzzy xyzzy"
        if part(text, config) != "train":
            (source / f"new{n}.txt").write_text(text)
    after = prepare(config, cache)
    assert np.array_equal(before.train.tokens, after.train.tokens)
    assert before.fingerprint != after.fingerprint
    model = "tokenizer.json"
    assert (before.folder / model).read_bytes() == (after.folder / model).read_bytes()


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty", "meta", "tokenizer"])
def test_a_damaged_cache_is_rebuilt(source: Path, cache: Path, damage: str) -> None:
    config = data(source, BPE(vocab_size=300))
    before = prepare(config, cache)
    expected = np.array(before.train.tokens)
    path = before.folder / "train.bin"
    content = bytearray(path.read_bytes())
    match damage:
        case "truncate":
            path.write_bytes(content[:-2])
        case "flip":
            content[5] ^= 1
            path.write_bytes(content)
        case "remove":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "meta":
            (before.folder / "meta.json").write_text("{")
        case "tokenizer":
            (before.folder / "tokenizer.json").write_text("{}")
    after = prepare(config, cache)
    assert np.array_equal(after.train.tokens, expected)
    assert after.fingerprint == before.fingerprint
    assert [p.name for p in cache.iterdir()] == [after.folder.name]  # nothing is left beside it


def test_two_processes_at_once(source: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tensorformer.config.schema import BPE, Data;"
        "from tensorformer.data.prepare import prepare; sys.stdin.readline();"
        "c = prepare(Data(source=sys.argv[1], tokenizer=BPE(vocab_size=300), validation=.3, tuning=.2),"
        "Path(sys.argv[2])); print(c.fingerprint, int(c.train.tokens.sum()))"
    )
    arguments = [sys.executable, "-c", code, str(source), str(cache)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert len(list(cache.iterdir())) == 1


def test_the_slower_of_two_builds_gives_way(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking and renaming another process finishes: its arrays, which may be mapped already, stay."""
    write = module._write

    def overtaken(*arguments: object) -> None:
        monkeypatch.setattr(module, "_write", write)
        other.append(prepare(data(source), cache))
        write(*arguments)  # type: ignore[arg-type]

    other: list[Corpus] = []
    monkeypatch.setattr(module, "_write", overtaken)
    corpus = prepare(data(source), cache)
    inode = (corpus.folder / "train.bin").stat().st_ino
    assert inode == os.stat(other[0].train.tokens.filename).st_ino  # type: ignore[attr-defined]
    assert len(list(cache.iterdir())) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module._PartFile, "append", full)
    with pytest.raises(
        DataError, match=r"can't be written \(No space left on device\); .* set TENSORFORMER_CACHE"
    ) as e:
        prepare(data(source), cache)
    assert str(cache) in str(e.value)
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="token cache can't be written"):
        prepare(data(source), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_what_a_killed_build_left_is_removed_when_old(source: Path, cache: Path) -> None:
    folder = prepare(data(source), cache).folder
    old, young = cache / f".{folder.name}.old", cache / f".{folder.name}.new"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    (folder / "meta.json").unlink()
    prepare(data(source), cache)
    assert young.exists()
    assert not old.exists()


def test_a_source_that_changes_while_it_is_read(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = module._survey

    def edited(config: Data) -> str:
        key = survey(config)
        (source / "00.txt").write_text("changed")
        return key

    monkeypatch.setattr(module, "_survey", edited)
    with pytest.raises(DataError, match="changed while it was being read"):
        prepare(data(source), cache)
    assert list(cache.iterdir()) == []


def test_a_part_without_documents_says_which_share_to_set(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "few"
    source.mkdir()
    for i in range(8):
        (source / f"{i}.txt").write_text(f"text {i}")
    messages = []
    shares: dict[str, float] = {"validation": 0.001, "tuning": 0.001}
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            prepare(data(source, validation=shares["validation"], tuning=shares["tuning"]), cache)
        messages.append(str(caught.value))
        name, share = messages[-1].split("set data.")[1].split(" or ")[0].split(" = ")
        shares[name] = float(share)
    corpus = prepare(
        data(source, validation=shares["validation"], tuning=shares["tuning"]), cache
    )  # what each message says is what helps
    assert corpus.validation.n_documents == corpus.tuning.n_documents == 1
    assert "holds 8 documents and none falls into the validation part: set data.validation = 0." in messages[0]

    (tmp_path / "one.txt").write_text("just this")
    with pytest.raises(
        DataError, match=r"holds 1 document and none falls into the .* part: add documents, or name a text"
    ):
        prepare(data(tmp_path / "*.txt"), cache)
    with pytest.raises(DataError, match=r"train part: lower data.validation or data.tuning"):
        prepare(data(source, validation=0.99, tuning=0.001), cache)
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        prepare(data(source, validation=0.6, tuning=0.4), cache)


def test_one_text_file_is_a_corpus(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "shakespeare.txt"
    path.write_text("".join(f"Speaker {i}:\nNow is the winter of our discontent\n\n" for i in range(4_000)))
    corpus = prepare(Data(source=str(path)), cache)
    total = corpus.train.n_bytes + corpus.validation.n_bytes + corpus.tuning.n_bytes
    assert total == path.stat().st_size
    assert 0.01 < corpus.validation.n_bytes / total < 0.1


def test_a_byte_0_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"text {i}" + "\0" * (i == 30)}) for i in range(60)))
    with pytest.raises(DataError, match=r"a.jsonl:31 contains byte 0, which ends a document here"):
        prepare(data(path), cache)
    corpus = prepare(data(path, BPE(vocab_size=260)), cache)  # where another token ends documents, it is text
    assert any("\0" in text for name in PARTS for text in texts_of(corpus, getattr(corpus, name)))


def test_a_tokenizer_file_is_part_of_the_key(source: Path, cache: Path, tmp_path: Path) -> None:
    prepare(data(source, BPE(vocab_size=300)), cache).tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    config = data(source, TokenizerFile(path=str(path), end_of_document="<|endoftext|>"))
    first = prepare(config, cache)
    assert first.fingerprint == prepare(data(source, BPE(vocab_size=300)), cache).fingerprint  # the same tokens
    path.write_text(path.read_text().replace("<|endoftext|>", "<|end|>"))
    with pytest.raises(DataError, match=r"no token '<\|endoftext\|>'"):
        prepare(config, cache)


def test_the_standard_library_in_seconds(cache: Path) -> None:
    corpus = prepare(Data(), cache)
    assert corpus.train.n_bytes > 10_000_000
    assert 0.01 < corpus.validation.n_bytes / corpus.train.n_bytes < 0.2
