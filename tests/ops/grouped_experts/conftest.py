"""What tests of grouped experts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorformer.ops.grouped_experts import native


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was compiled on this machine before, "auto" is "fast"."""
    monkeypatch.setenv("TENSORFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_BUILT", {})
