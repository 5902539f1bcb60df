"""RMSNorm: torch's own is the oracle, values, gradients and gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

from tensorformer.nn import norm as norm_module
from tensorformer.nn.norm import rms_norm

EPS = 1e-6
Norm = Callable[[Tensor, Tensor | None, float], Tensor]


def check(norm: Norm, x: Tensor, weight: Tensor | None, rtol: float) -> None:
    """Fail unless value and both gradients equal torch's."""
    leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
    grad = torch.randn(x.shape).to(x.dtype)

    def run(f: Callable[..., Tensor]) -> list[Tensor]:
        y = f(*leaves)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    ours = run(lambda x, w=None: norm(x, w, EPS))
    theirs = run(lambda x, w=None: F.rms_norm(x, (x.shape[-1],), w, EPS))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from([1, 3, 63, 257]), st.booleans())
def test_equals_torch_in_float64_at_any_size_and_stride(shape: list[int], d: int, gain: bool) -> None:
    x = torch.randn(d, *shape, dtype=torch.float64).movedim(0, -1)
    check(rms_norm, x, torch.randn(d, dtype=torch.float64) if gain else None, 1e-11)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_equals_torch_in_lower_precision(dtype: torch.dtype, rtol: float) -> None:
    x = torch.randn(5, 7, 65).to(dtype)
    check(rms_norm, x, torch.randn(65).to(dtype), rtol)
    check(rms_norm, x, None, rtol)


def test_the_check_catches_a_mean_that_is_subtracted() -> None:
    with pytest.raises(AssertionError):
        check(lambda x, w, eps: rms_norm(x - 1e-3 * x.mean(-1, keepdim=True), w, eps), torch.randn(4, 9), None, 2e-5)


@pytest.mark.parametrize("gain", [True, False])
def test_gradients_of_gradients(gain: bool) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True) if gain else None
    inputs = (x, w) if w is not None else (x,)
    f = lambda x, w=None: rms_norm(x, w, EPS)  # noqa: E731
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_only_the_input_is_kept_for_backward_and_it_is_not_written_to() -> None:
    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    before, kept = x.detach().clone(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = rms_norm(x, w, EPS)
    assert set(kept) == {x.data_ptr(), w.data_ptr()}
    y.sum().backward()  # a gradient of stride 0
    assert torch.equal(x, before)


def test_zero_rows_and_empty_inputs() -> None:
    assert norm_module.unit_rms(torch.zeros(2, 4), EPS).eq(0).all()
    assert norm_module.unit_rms(torch.zeros(0, 4), EPS).shape == (0, 4)
