"""`tensorformer study precision`: its table and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorformer.cli.study_precision import PrecisionOfActivations
from tensorformer.errors import GateError, StorageError
from tensorformer.study import precision


def test_a_table_of_those_named(capsys: pytest.CaptureFixture[str]) -> None:
    PrecisionOfActivations(names=("silu", "gelu_new")).run()
    text = capsys.readouterr().out
    assert "silu" in text
    assert "gelu_tanh" in text  # what it really is
    assert "bfloat16" in text
    assert "sigmoid" not in text


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "activations_page", lambda: "the page\n")
    PrecisionOfActivations(write=tmp_path / "new" / "page.md").run()
    assert (tmp_path / "new" / "page.md").read_text() == "the page\n"


def test_mistakes() -> None:
    with pytest.raises(GateError, match="did you mean 'gelu'"):
        PrecisionOfActivations(names=("gleu",)).run()
    with pytest.raises(StorageError, match="can't be written"):
        PrecisionOfActivations(write=Path("/proc/nowhere/page.md")).run()
