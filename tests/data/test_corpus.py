"""Where documents come from: every kind of source, what is left out, and what every bad input says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.config.schema import Data
from tensorformer.data.corpus import documents, pieces
from tensorformer.errors import DataError


def texts(*source: Path | str, field: str = "text") -> dict[str, str]:
    data = Data(source=tuple(str(s) for s in source), text_field=field)
    return {document.name: document.text for document in documents(data)}


def error(*source: Path | str, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        texts(*source, field=field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_standard_library_is_there_in_order_and_whole() -> None:
    names = [document.name for document in documents(Data())]
    assert len(names) > 500
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


def test_stdlib_leaves_out_what_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"a.py": b"x = 1\n", "b.py": b"\xff", "c.py": b"\0", "d.py": b" \n", "e.txt": b"no"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/f.py").write_text("no")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert [(d.name, d.text) for d in documents(Data())] == [("a.py", "x = 1\n")]


def test_folders_globs_and_files(tmp_path: Path) -> None:
    (tmp_path / "sub/deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.md", "sub/deep/c", ".git/config", "sub/.hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub/empty.txt").write_text("\n\n")
    folder = [str(tmp_path / name) for name in ("a.md", "b.txt", "sub/deep/c")]
    assert list(texts(tmp_path)) == folder
    assert list(texts(tmp_path / "**/*.txt")) == [folder[1]]
    assert list(texts(tmp_path / "b.txt", tmp_path)) == [folder[1], folder[0], folder[2]]  # met twice, counted once


def test_line_ends_are_kept_and_the_byte_order_mark_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\N{ZERO WIDTH NO-BREAK SPACE}línea\r\n🐍\r".encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "uno\r\n\u2028dos"}).encode() + b"\r\n")
    assert list(texts(tmp_path / "a.txt", tmp_path / "b.jsonl").values()) == ["línea\r\n🐍\r", "uno\r\n\u2028dos"]


def test_jsonl_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two", "id": 3}')
    assert texts(path) == {f"{path}:1": "one", f"{path}:4": "two"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "a.jsonl:2: not JSON"),
        (b'{"text": "\xff"}', "a.jsonl:2: not JSON"),
        (b'{"text": "\\ud800"}', "a.jsonl:2: not JSON"),
        (b"[1]", "a.jsonl:2: a list, not a JSON object with the field 'text'"),
        (b'{"texts": "x"}', "a.jsonl:2: no field 'text'; set data.text_field; did you mean 'texts'?"),
        (b'{"text": 3}', "a.jsonl:2: field 'text' holds a int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert message in error(tmp_path / "a.jsonl")


def test_bad_files_are_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shakespeare.txt").write_text("to be")
    Path("binary.bin").write_bytes(b"abc\0def")
    Path("latin.txt").write_bytes("español".encode("latin-1"))
    Path("empty.txt").write_bytes(b"")
    Path("folder").mkdir()
    assert "did you mean 'shakespeare.txt'?" in error("shakespear.txt")
    assert "did you mean 'stdlib'?" in error("stdlb")
    assert "there is no folder nowhere" in error("nowhere/a.txt")
    assert "binary.bin: a binary file (byte 0 at offset 3); convert it" in error("binary.bin")
    assert "latin.txt: not UTF-8 text (byte 0xf1 at offset 4); convert it" in error("latin.txt")
    assert "latin.txt: not UTF-8 text" in error("latin*")
    assert "empty.txt: the file is empty" in error("empty.txt")
    assert "'folder': the folder holds no files" in error("folder")
    assert "'*.csv': no file matches" in error("*.csv")
    assert "holds no text" in error("empty*")
    with pytest.raises(DataError, match="holds no text"):
        list(documents(Data(source=())))


def test_a_named_text_file_is_cut_into_documents(tmp_path: Path) -> None:
    paragraphs = [f"{i}: " + "lorem ipsum " * (i % 30) + "\n\n" for i in range(2_000)]
    path = tmp_path / "book.txt"
    path.write_text("".join(paragraphs))
    cut = list(texts(path).values())
    assert "".join(cut) == "".join(paragraphs)
    assert 200 < len(cut) < 400
    assert all(text.endswith("\n\n") for text in cut)
    assert len(texts(tmp_path)) == 1  # found in a folder, it is one document

    longer = path.read_text() + "and the last\n\n"
    path.write_text(longer)
    assert list(texts(path).values())[: len(cut) - 1] == cut[:-1]  # appending moves no earlier cut


@given(st.lists(st.sampled_from(["a" * 700, "é" * 999, "🐍" * 400, "\n", "\r\n\r\n", "x y\n"]), max_size=40))
def test_pieces_are_the_file_and_break_no_character(parts: list[str]) -> None:
    content = "".join(parts).encode()
    cut = list(pieces(io.BytesIO(content), len(content)))
    assert b"".join(cut) == content
    assert all(0 < len(piece) <= 5 * 1024 for piece in cut)
    for piece in cut:
        piece.decode()
