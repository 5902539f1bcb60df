"""Where files that can be made again are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorformer.errors import ConfigError
from tensorformer.files import cache_folder


@pytest.fixture
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_variables")
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/tensorformer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x/tensorformer"
    monkeypatch.setenv("TENSORFORMER_CACHE", "~/there")
    assert cache_folder() == tmp_path / "there"
    monkeypatch.undo()
    monkeypatch.delenv("TENSORFORMER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError()))
    with pytest.raises(ConfigError, match="set TENSORFORMER_CACHE"):
        cache_folder()
