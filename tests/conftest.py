"""What every test shares: one thread a process (the suite runs two), and Hypothesis without a clock."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

from tests.recipes import write_tiny

hypothesis.settings.register_profile(
    "tensorformer",
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tensorformer")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a new folder that holds a small corpus, the recipe ``tiny.toml``, and the token cache."""
    monkeypatch.setenv("TENSORFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    return tmp_path
