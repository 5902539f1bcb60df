"""What every test shares: one thread a process (the suite runs two), and Hypothesis without a clock."""

from __future__ import annotations

import hypothesis
import pytest
import torch

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
