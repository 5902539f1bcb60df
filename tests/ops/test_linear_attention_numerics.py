"""Linear attention keeps its error budget, in float32 first, also where decays are strong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorformer.ops.linear_attention import blocks, linear_attention
from tests.ops import linear_attention_laws as laws
from tests.ops.linear_attention_laws import operands

LOW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("decay", laws.DECAYS)
@pytest.mark.parametrize("key_dims", [(16,), (8, 6)], ids=str)
@pytest.mark.parametrize("chunk", [None, 100, 1 << 20])
def test_error_budget(dtype: torch.dtype, decay: str, key_dims: tuple[int, ...], chunk: int | None) -> None:
    x = operands(257, key_dims, decay, state=True, heads=2, value=16)
    laws.keeps_the_error_budget(linear_attention, x, dtype, chunk=chunk)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_error_budget_step_by_step(dtype: torch.dtype) -> None:
    laws.keeps_the_error_budget(linear_attention, operands(63, state=True), dtype, chunk=1)


@pytest.mark.parametrize("rate", [-1e-4, -5.0, -20.0, -1000.0])
def test_decay_of_any_strength_at_every_step(rate: float) -> None:
    x = operands(150, (4, 4), "mild", state=True, heads=2)
    assert x.log_decay is not None
    x.log_decay = x.log_decay + rate
    laws.equals_the_recurrence(linear_attention, x, chunk=70)
    laws.keeps_the_error_budget(linear_attention, x, torch.float32, chunk=70)


def test_resets_have_finite_values_and_gradients() -> None:
    x = operands(140, decay="resets", state=True)
    for chunk in (1, 100, 140):
        found = laws.run(linear_attention, x, chunk=chunk)
        assert all(t.isfinite().all() for t in found.values())


def test_float16_products_of_scores_may_exceed_float16() -> None:
    """q₁·k₁ and q₂·k₂ are 500 each: their product is beyond float16, times a small value it is not."""
    q = torch.full((1, 8, 1, 5), 10.0, dtype=torch.float16)
    v = torch.full((1, 8, 1, 2), 1e-3, dtype=torch.float16)
    y, _ = linear_attention((q, q), (q, q), v)
    torch.testing.assert_close(y[0, :, 0, 0].float(), 250 * torch.arange(1.0, 9.0), rtol=2e-3, atol=0)


def test_the_float32_budget_catches_a_derivative_wrong_by_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 alone it would pass: the reason for float32 first."""
    right = blocks.attend_grad

    def wrong(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv, product = right(*args, **kwargs)
        return dq, dk, dv * 1.01, product

    monkeypatch.setattr(blocks, "attend_grad", wrong)
    x = operands(257, (8, 6), "mild", heads=2, value=16)
    with pytest.raises(AssertionError, match="d_v"):
        laws.keeps_the_error_budget(linear_attention, x, torch.float32)
    laws.keeps_the_error_budget(linear_attention, x, torch.bfloat16)


def test_a_decay_summed_in_float32_would_break_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    init = blocks.Decay.__init__

    def narrow(self: blocks.Decay, log_decay: Tensor, dtype: torch.dtype) -> None:
        init(self, log_decay, dtype)
        self.total = (log_decay.float() * blocks.LOG2_E).cumsum(1).unsqueeze(2).double()

    monkeypatch.setattr(blocks.Decay, "__init__", narrow)
    with pytest.raises(AssertionError):
        laws.keeps_the_error_budget(linear_attention, operands(257, decay="strong"), torch.float32, chunk=257)


def test_uninitialised_memory_is_never_read() -> None:
    """torch fills empty buffers with NaN here; anything that reads one shows it."""
    cases = [operands(t, decay=d, state=s) for t in (1, 70, 150) for d in ("none", "mild") for s in (False, True)]
    clean = [laws.run(linear_attention, x, chunk=100) for x in cases]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = [laws.run(linear_attention, x, chunk=100) for x in cases]
    finally:
        torch.use_deterministic_algorithms(False)
    for found, truth in zip(poisoned, clean, strict=True):
        laws.assert_near(found, truth, 0.0)
