"""Linear attention obeys its laws in every form, and the laws catch implementations that don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorformer.ops.linear_attention import blocks, linear_attention, resolve
from tests.ops import linear_attention_laws as laws
from tests.ops.linear_attention_laws import DECAYS, Operands, operands, run, small_tiles

fast = linear_attention


SIZES = st.fixed_dictionaries(
    {
        "time": st.integers(1, 40),
        "key_dims": st.sampled_from([(6,), (1,), (3, 4), (5, 2), (1, 1)]),
        "decay": st.sampled_from(DECAYS),
        "state": st.booleans(),
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "value": st.sampled_from([1, 3, 5]),
        "seed": st.integers(0, 2**16),
    }
)
CHUNKS = st.sampled_from([None, 1, 3, 7, 8, 16, 40, 64])


@given(SIZES, CHUNKS)
def test_every_form_equals_the_recurrence_with_its_gradients(sizes: dict[str, Any], chunk: int | None) -> None:
    with small_tiles():
        laws.equals_the_recurrence(fast, operands(**sizes), chunk=chunk)


@given(SIZES, CHUNKS)
def test_equals_the_explicit_kronecker_form(sizes: dict[str, Any], chunk: int | None) -> None:
    x = operands(**sizes)
    with small_tiles():
        laws.equals_the_explicit_form(fast, x, chunk=chunk)
    laws.equals_the_explicit_form(laws.reference, x)


@given(SIZES, CHUNKS, st.floats(0, 1))
def test_prefix_then_suffix_is_the_whole(sizes: dict[str, Any], chunk: int | None, where: float) -> None:
    with small_tiles():
        cut = round(where * sizes["time"])
        laws.prefix_then_suffix_is_the_whole(fast, operands(**sizes), cut, chunk=chunk)


@given(SIZES, CHUNKS, st.floats(0, 1))
def test_is_causal(sizes: dict[str, Any], chunk: int | None, where: float) -> None:
    with small_tiles():
        laws.is_causal(fast, operands(**sizes), round(where * (sizes["time"] - 1)), chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 5, 32])
@pytest.mark.parametrize("decay", ["none", "mild"])
def test_rows_are_independent(chunk: int, decay: str) -> None:
    with small_tiles():
        laws.rows_are_independent(fast, operands(17, decay=decay, state=True), chunk=chunk)


@pytest.mark.parametrize("time", [1, 3, 7, 63, 65, 129, 257])
@pytest.mark.parametrize("chunk", [None, 100, 128])
def test_real_tiles_at_sizes_off_them(time: int, chunk: int | None) -> None:
    for decay in ("none", "mild"):
        x = operands(time, decay=decay, state=time % 4 == 3, batch=1, heads=2)
        laws.equals_the_recurrence(fast, x, chunk=chunk)


def test_no_steps() -> None:
    for state in (False, True):
        found = run(fast, x := operands(0, state=state))
        assert found["y"].shape == (2, 0, 3, 5)
        if x.state is not None:
            assert torch.equal(found["final state"], x.state)
        else:
            assert not found["final state"].any()


def test_polarisation() -> None:
    """(q₁·k₁)(q₂·k₂) = ¼[((q₁;q₂)·(k₁;k₂))² − ((q₁;−q₂)·(k₁;k₂))²]: two squared forms make the product."""
    x = operands(33, key_dims=(4, 4))
    (q1, q2), (k1, k2) = x.q, x.k
    both, opposed, keys = (torch.cat(pair, -1) for pair in ((q1, q2), (q1, -q2), (k1, k2)))
    with small_tiles():
        y = fast((q1, q2), (k1, k2), x.v, x.log_decay)[0]
        plus = fast((both, both), (keys, keys), x.v, x.log_decay)[0]
        minus = fast((opposed, opposed), (keys, keys), x.v, x.log_decay)[0]
    torch.testing.assert_close(y, (plus - minus) / 4, rtol=0, atol=1e-12)


def test_a_reset_starts_a_new_document() -> None:
    whole = operands(30, decay="mild")
    assert whole.log_decay is not None
    whole.log_decay[:, 13] = -torch.inf
    with small_tiles():
        y, s = whole.call(fast, chunk=9)
        alone, after = whole.steps(13, None, None).call(fast, chunk=9)
    laws.assert_near({"y": y[:, 13:], "s": s}, {"y": alone, "s": after})


def test_decoding_step_by_step_leaves_older_states_alone() -> None:
    x = operands(12, state=True)
    y, last = x.call(fast)
    states, outputs = [x.state], []
    with torch.no_grad():
        for t in range(12):
            out, after = x.steps(t, t + 1, states[t]).call(fast)
            outputs.append(out)
            states.append(after)
        again, _ = x.steps(5, 6, states[5]).call(fast)
    assert torch.equal(again, outputs[5])
    assert states[12] is not None
    laws.assert_near({"y": torch.cat(outputs, 1), "s": states[12]}, {"y": y, "s": last})


@pytest.mark.parametrize("key_dims", [(2,), (2, 3)])
@pytest.mark.parametrize("decay", ["none", "mild"])
@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_first_and_second_derivatives(key_dims: tuple[int, ...], decay: str, impl: str) -> None:
    x = operands(5, key_dims, decay, state=True, batch=1, heads=2, value=2)
    leaves = [t.requires_grad_() for t in x.named().values()]
    degree = len(key_dims)
    chunk = 2 if impl == "fast" else None

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, (v, *rest) = tensors[:degree], tensors[degree : 2 * degree], tensors[2 * degree :]
        log_decay, state = rest if len(rest) == 2 else (None, rest[0])
        return Operands(q, k, v, log_decay, state).call(linear_attention, chunk=chunk, impl=impl)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_tied_operands_get_each_share_once() -> None:
    x = torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return linear_attention((x, x), (x, x), x, chunk=2)[0]

    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(call, x)


def test_gradient_of_only_one_output() -> None:
    x = operands(20, state=True).map(lambda _, t: t.requires_grad_())
    named = x.named()
    for output in (0, 1):
        with small_tiles():
            fast_grads = torch.autograd.grad(
                x.call(fast, chunk=6)[output].sum(), list(named.values()), allow_unused=True
            )
        truth = torch.autograd.grad(x.call(laws.reference)[output].sum(), list(named.values()), allow_unused=True)
        for name, found, want in zip(named, fast_grads, truth, strict=True):
            want = torch.zeros_like(found) if want is None else want
            torch.testing.assert_close(found, want, rtol=0, atol=1e-12, msg=name)


# Broken on purpose: each must fail the law that is there to catch it.

Break = Callable[[pytest.MonkeyPatch], laws.Op]


def decay_forgotten_between_the_steps_of_a_tile(patch: pytest.MonkeyPatch) -> laws.Op:
    pairs = blocks.Decay.pairs
    patch.setattr(blocks.Decay, "pairs", lambda self, a, b: (pairs(self, a, b) != 0).to(self.dtype))
    return fast


def decay_forgotten_between_tiles(patch: pytest.MonkeyPatch) -> laws.Op:
    patch.setattr(blocks.Decay, "columns", lambda self, start: torch.ones_like(self.total[:, :start]))
    return fast


def decay_of_the_state_one_step_late(patch: pytest.MonkeyPatch) -> laws.Op:
    into = blocks.Decay.into
    patch.setattr(blocks.Decay, "into", lambda self, a, b: into(self, a, b).roll(1, 1))
    return fast


def branches_swapped_in_the_state(patch: pytest.MonkeyPatch) -> laws.Op:
    return lambda q, k, *args, **kwargs: fast(q[::-1], k[::-1], *args, **kwargs)


def blind_to_itself(patch: pytest.MonkeyPatch) -> laws.Op:
    def strict(gram: Tensor, mask: Tensor | bool) -> None:
        if mask is not False:
            gram[:, :, gram.shape[2] - gram.shape[1] :].tril_(-1)

    patch.setattr(blocks, "_mask", strict)
    return fast


def sees_one_step_ahead(patch: pytest.MonkeyPatch) -> laws.Op:
    def loose(gram: Tensor, mask: Tensor | bool) -> None:
        if mask is not False:
            gram[:, :, gram.shape[2] - gram.shape[1] :].tril_(1)

    patch.setattr(blocks, "_mask", loose)
    return fast


def decays_between_steps_get_no_gradient(patch: pytest.MonkeyPatch) -> laws.Op:
    between = blocks.decays_between
    patch.setattr(blocks, "decays_between", lambda product: 0 * between(product))
    return fast


def second_branch_gets_the_gradient_of_the_first(patch: pytest.MonkeyPatch) -> laws.Op:
    grad = blocks.features_grad
    patch.setattr(blocks, "features_grad", lambda d, x: (grad(d, x)[0], grad(d, (x[1], x[0]))[1]))
    return fast


def rows_of_the_batch_mixed(patch: pytest.MonkeyPatch) -> laws.Op:
    def mixed(q: Any, k: Any, v: Tensor, **kwargs: Any) -> Any:
        return fast(q, k, v + 0 * v.mean(0, keepdim=True), **kwargs)

    return mixed


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (decay_forgotten_between_the_steps_of_a_tile, laws.equals_the_recurrence),
        (decay_forgotten_between_the_steps_of_a_tile, laws.equals_the_explicit_form),
        (decay_forgotten_between_tiles, laws.equals_the_recurrence),
        (decay_forgotten_between_tiles, laws.prefix_then_suffix_is_the_whole),
        (decay_of_the_state_one_step_late, laws.equals_the_recurrence),
        (branches_swapped_in_the_state, laws.equals_the_recurrence),
        (branches_swapped_in_the_state, laws.equals_the_explicit_form),
        (blind_to_itself, laws.is_causal),
        (sees_one_step_ahead, laws.is_causal),
        (decays_between_steps_get_no_gradient, laws.equals_the_recurrence),
        (second_branch_gets_the_gradient_of_the_first, laws.equals_the_recurrence),
        (rows_of_the_batch_mixed, laws.rows_are_independent),
    ],
    ids=lambda f: f.__name__,
)
def test_the_laws_catch(broken: Break, law: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = operands(30, key_dims=(3, 3), state=True)
    where = {laws.prefix_then_suffix_is_the_whole: {"cut": 13}, laws.is_causal: {"step": 13}}.get(law, {})
    with small_tiles():
        law(fast, x, **where, chunk=16)
        op = broken(monkeypatch)
        with pytest.raises((AssertionError, RuntimeError)):
            law(op, x, **where, chunk=16)


def test_auto_takes_the_quadratic_form_until_the_state_is_cheaper() -> None:
    def chosen(time: int, state: bool = False, final_state: bool = True) -> str:
        x = operands(time, key_dims=(16, 16), decay="none", state=state, batch=1, heads=1, value=64)
        return x.call(resolve, final_state=final_state).form

    assert chosen(256, final_state=False) == "quadratic"
    assert chosen(4 * 16 * 16 * 64 // 96, final_state=False) == "quadratic"
    assert chosen(4 * 16 * 16 * 64 // 96 + 1, final_state=False) == "chunked"
    assert chosen(600, final_state=True) == "chunked"
    assert chosen(129, state=True) == "chunked"
