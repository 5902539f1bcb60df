"""``tensorformer gallery`` as a person meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_main import tensorformer


def test_it_writes_the_page_and_the_sheets_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tensorformer("gallery", "--out", "site/all.html", "--png", "site")
    assert out.split() == ["site/all.html", "site/scalars.png", "site/gates.png", "site/gallery.png"]
    assert sorted(p.name for p in (tmp_path / "site").iterdir()) == [
        "all.html",
        "gallery.png",
        "gates.png",
        "scalars.png",
    ]


def test_what_can_not_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    error = tensorformer("gallery", "--out", "file/gallery.html", code=1)
    assert error.startswith("error: ")
    assert "file" in error
    assert error.count("\n") == 1


def test_help_says_what_it_writes_and_loads_nothing_heavy() -> None:
    text = tensorformer("gallery", "--help")
    for word in ("--out", "--png", "gallery.html", "FOLDER", "(default: no pictures)"):
        assert word in text
    assert "None" not in text.replace("None}", "")
    code = "import sys, tensorformer.cli.gallery; print([m for m in ('torch', 'altair', 'sympy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
