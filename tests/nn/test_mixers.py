"""Laws of every mixer: pieces, padding, packed documents, rows, gradients; and implementations that must fail them."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tensorformer.config.presets import resolved
from tensorformer.config.schema import LinearAttention, SoftmaxAttention
from tensorformer.config.shapes import heads
from tensorformer.errors import ShapeError
from tensorformer.nn.constants import Constants
from tensorformer.nn.state import LinearState, compact, from_tensors, join, select, tensors
from tests.nn import mixer_laws as laws
from tests.nn.mixer_laws import CONFIGS, fails, inputs, make

every_mixer = pytest.mark.parametrize("name", CONFIGS)


@every_mixer
@settings(max_examples=6)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_going_on_equals_the_whole(name: str, cuts: list[int]) -> None:
    laws.check_pieces(make(CONFIGS[name]), cuts)


@every_mixer
def test_a_single_token_and_many(name: str) -> None:
    laws.check_pieces(make(CONFIGS[name]), [1, 1, 130, 1, 67])


@every_mixer
def test_causal(name: str) -> None:
    laws.check_causal(make(CONFIGS[name]))


@every_mixer
@settings(max_examples=6)
@given(st.data())
def test_a_padded_row_equals_the_row_alone(name: str, data: st.DataObject) -> None:
    time = data.draw(st.integers(1, 8))
    rows = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=time, max_size=time), min_size=1, max_size=3))
    laws.check_padding(make(CONFIGS[name]), rows)


@every_mixer
@pytest.mark.parametrize("row", [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
def test_padding_at_batch_size_one_and_nan_in_it(name: str, row: list[int]) -> None:
    laws.check_padding(make(CONFIGS[name]), [row], torch.nan)


@every_mixer
@settings(max_examples=6)
@given(st.data())
def test_packed_documents_equal_documents_alone(name: str, data: st.DataObject) -> None:
    def row() -> list[int]:
        lengths = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=3, max_size=3))
        ids = [i for n, (real, gap) in enumerate(lengths) for i in [n] * real + [-1] * gap]
        return (ids + [-1] * 21)[:12]

    laws.check_packed(make(CONFIGS[name]), [row(), row()])


@every_mixer
def test_order_of_rows_is_irrelevant(name: str) -> None:
    laws.check_rows(make(CONFIGS[name]))


@every_mixer
def test_nan_stays_in_its_row(name: str) -> None:
    laws.check_nan_stays_in_its_row(make(CONFIGS[name]))


@every_mixer
def test_weights_make_the_sums(name: str) -> None:
    laws.check_weights(make(CONFIGS[name]))
    laws.check_weights(make(CONFIGS[name]), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2]]))


@every_mixer
@pytest.mark.parametrize("segments", [None, [[0, 0, 1, 1], [-1, 0, 0, 1]]])
def test_gradients(name: str, segments: list[list[int]] | None) -> None:
    mixer, x = make(CONFIGS[name]), inputs(2, 4).requires_grad_()
    packed = None if segments is None else torch.tensor(segments)
    parameters = list(mixer.parameters())

    def output(x: Tensor, *_: Tensor) -> Tensor:
        return mixer(x, None, packed)[0]

    assert torch.autograd.gradcheck(output, (x, *parameters), fast_mode=True)


@every_mixer
def test_gradients_pass_through_the_state(name: str) -> None:
    mixer, x = make(CONFIGS[name]), inputs(1, 6).requires_grad_()
    (whole,) = torch.autograd.grad(mixer(x)[0][:, 3:].sum(), x)
    _, state = mixer(x[:, :3], mixer.initial_state(1))
    (pieces,) = torch.autograd.grad(mixer(x[:, 3:], state)[0].sum(), x)
    laws.close(pieces, whole, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_mixer
def test_low_precision_keeps_its_dtype_and_a_wide_state(name: str, dtype: torch.dtype) -> None:
    mixer = make(CONFIGS[name])
    exact = mixer(inputs(2, 9))[0]
    narrow = mixer.to(dtype)
    y, state = narrow(inputs(2, 9).to(dtype), narrow.initial_state(2))
    assert y.dtype == dtype
    if isinstance(state, LinearState):
        assert state.memory.dtype == torch.float32
    error = (y.double() - exact).abs().max() / exact.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)


# what must be caught


class Broken:
    """A mixer with something done to its arguments."""

    def __init__(self, mixer: Any, change: Any) -> None:
        self.mixer, self.change = mixer, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mixer, name)

    def __call__(self, x: Tensor, state: Any = None, segments: Tensor | None = None) -> Any:
        return self.mixer(*self.change(x, state, segments))


def test_a_mask_that_is_skipped_for_one_row_is_caught() -> None:
    for name in ("softmax", "bilinear", "gdn"):
        skipping = Broken(make(CONFIGS[name]), lambda x, s, g: (x, s, g if len(x) > 1 else None))
        assert fails(laws.check_padding, skipping, [[0, 0, 1, 1]])


def test_a_convolution_that_reads_the_document_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer: Any = make(CONFIGS["gdn"])
    whole = mixer.convolution.forward
    monkeypatch.setattr(mixer.convolution, "forward", lambda x, before, segments: whole(x, before, None))
    assert fails(laws.check_packed, mixer, [[0, 0, 0, 1, 1]])


def test_a_state_without_its_convolution_is_caught() -> None:
    def forgetful(x: Tensor, state: Any, segments: Tensor | None) -> Any:
        return x, state and state._replace(convolution=torch.zeros_like(state.convolution)), segments

    assert fails(laws.check_pieces, Broken(make(CONFIGS["kda"]), forgetful), [3, 2])


def test_rows_that_change_place_are_caught() -> None:
    turned = Broken(make(CONFIGS["bilinear"]), lambda x, s, g: (x.flip(0), s, g))
    assert fails(laws.check_rows, turned)


# properties of single presets


def test_power_is_a_mean_with_positive_weights_and_bilinear_is_not() -> None:
    x = inputs(2, 20)
    power, bilinear = make(CONFIGS["power"]).weights(x), make(CONFIGS["bilinear"]).weights(x)
    assert (power >= 0).all()
    torch.testing.assert_close(power.sum(-1), torch.ones_like(power[..., 0]), rtol=0, atol=1e-3)  # eps beside the sum
    assert (bilinear < 0).any()


def test_power_is_bilinear_with_equal_branches_over_its_row_sum() -> None:
    power: Any = make(CONFIGS["power"])
    bilinear: Any = make(CONFIGS["bilinear"])
    for a, b in ((power.q_proj, bilinear.q_proj), (power.k_proj, bilinear.k_proj)):
        for branch in b:
            branch.weight = a[0].weight
    x = inputs(2, 20)
    product = bilinear.weights(x)
    laws.close(power.weights(x), product / (product.sum(-1, keepdim=True) + 1e-6))


def test_a_window_of_one_is_the_token_itself() -> None:
    mixer = make(SoftmaxAttention(n_heads=2, window=1))
    weights = mixer.weights(inputs(1, 5))
    assert torch.equal(weights, torch.eye(5, dtype=weights.dtype).expand_as(weights))


def test_a_windowed_cache_stays_small() -> None:
    mixer: Any = make(CONFIGS["window"])
    state = mixer.initial_state(2)
    with torch.no_grad():
        for token in inputs(2, 50).split(1, 1):
            _, state = mixer(token, state)
            assert state.k.shape[2] <= 6
    assert state.seen.tolist() == [50, 50]


def test_a_growing_cache_is_written_behind_and_shared() -> None:
    mixer: Any = make(CONFIGS["softmax"])
    with torch.no_grad():
        _, first = mixer(inputs(1, 3), mixer.initial_state(1))
        _, second = mixer(inputs(1, 1, seed=2), first)
        assert second.k.untyped_storage().data_ptr() == first.k.untyped_storage().data_ptr()
        branch, _ = mixer(inputs(1, 1, seed=3), first)  # from the older state once more: nothing may be overwritten
        following = inputs(1, 2, seed=4)
        whole = mixer(torch.cat((inputs(1, 3), inputs(1, 1, seed=2), following), 1))[0][:, 4:]
        laws.close(mixer(following, second)[0], whole)
        laws.close(branch, mixer(torch.cat((inputs(1, 3), inputs(1, 1, seed=3)), 1))[0][:, 3:])


@pytest.mark.parametrize("name", ["bilinear_delta", "gdn", "kda", "gdn that turns"])
def test_delta_presets_stay_bounded_where_plain_keys_diverge(name: str) -> None:
    """The delta rule diverges as soon as β‖φ(k)‖² > 2 again and again; keys of length one can't."""
    mixer: Any = make(CONFIGS[name])
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(4)
        x = inputs(1, 1).expand(1, 400, -1) * 5  # one key, again and again

        def size() -> float:
            return float(mixer(x, mixer.initial_state(1))[1].memory.abs().max())

        bounded = size()
        values = mixer._operands(*mixer._placed(x, None, None), None, None).v.abs().max()
        assert bounded <= 2.5 * values
        mixer.preset = mixer.preset._replace(unit="none")
        if mixer.decay is None:
            assert not size() < 1e6 * bounded


# states


def states_of(*names: str) -> tuple[list[Any], tuple[Any, ...]]:
    mixers = [make(CONFIGS[n]) for n in names]
    with torch.no_grad():
        return mixers, tuple(m(inputs(2, 5), m.initial_state(2))[1] for m in mixers)


def test_states_can_be_taken_apart_and_put_together() -> None:
    mixers, state = states_of("softmax", "bilinear", "gdn")
    again = from_tensors(tensors(state), tuple(m.initial_state(2) for m in mixers))
    following = inputs(2, 3, seed=8)
    for m, a, b in zip(mixers, state, again, strict=True):
        assert torch.equal(m(following, a)[0], m(following, b)[0])


def test_columns_that_no_row_uses_are_dropped() -> None:
    mixers, (short,) = states_of("softmax")
    with torch.no_grad():
        _, long = mixers[0](inputs(1, 40, seed=2), mixers[0].initial_state(1))
    both = join((long,), (short,))
    left: Any
    (left,) = compact(select(both, torch.tensor([1, 2])))
    assert left.k.shape[2] == 5
    following = inputs(2, 3, seed=8)
    assert torch.equal(mixers[0](following, left)[0], mixers[0](following, short)[0])


def test_a_state_of_the_wrong_model_is_refused() -> None:
    mixers, state = states_of("softmax", "gdn")
    with pytest.raises(ShapeError, match=r"the state is of softmax attention .*this layer needs one of linear"):
        mixers[1](inputs(2, 1), state[0])
    other: Any = make(LinearAttention(preset="gdn", n_heads=2, head_dim=6, value_dim=4))
    with pytest.raises(ShapeError, match=r"values 5.*values 4"):
        other(inputs(2, 1), state[1])
    initial = tuple(m.initial_state(2) for m in mixers)
    with pytest.raises(ShapeError, match="of 1 blocks and the model has 2"):
        join(initial, state[:1])
    named = tensors(state)
    with pytest.raises(ShapeError, match=r"has no 1\.memory, which block 1"):
        from_tensors({n: t for n, t in named.items() if n != "1.memory"}, initial)
    with pytest.raises(ShapeError, match=r"has 2\.memory, which this model has no place for"):
        from_tensors({**named, "2.memory": named["1.memory"]}, initial)


@every_mixer
def test_a_state_is_as_large_as_the_preset_says(name: str) -> None:
    """The formula that `tensorformer list attention` shows, worked out."""
    config, mixer = CONFIGS[name], make(CONFIGS[name])
    if isinstance(config, LinearAttention):
        kept = [t for t in mixer.initial_state(1)[:2] if isinstance(t, Tensor)]
        h = heads(config, laws.D_MODEL)
        sizes = {"K": h.head_dim, "V": h.value_dim, "H": h.n_heads, "H_k": h.n_kv_heads}
        a_head = eval(resolved(config).state.replace("²", "**2").replace("·", "*"), sizes)
        assert sum(t.numel() for t in kept) == h.n_heads * a_head


@every_mixer
def test_a_state_keeps_nothing_else_alive(name: str) -> None:
    mixer = make(CONFIGS[name])
    with torch.no_grad():
        _, state = mixer(inputs(1, 300), mixer.initial_state(1))
    if isinstance(state, LinearState) and state.convolution is not None:
        assert state.convolution.untyped_storage().nbytes() == state.convolution.nbytes


@every_mixer
def test_a_state_of_other_rows_is_refused(name: str) -> None:
    mixer: Any = make(CONFIGS[name])
    with pytest.raises(ShapeError, match="the state has 3 rows and the input 1"):
        mixer(inputs(1, 4), mixer.initial_state(3))


@every_mixer
@pytest.mark.parametrize("segments", [torch.zeros(1, 4), torch.zeros(2, 4).long(), torch.zeros(4).long()])
def test_segments_that_do_not_fit_are_refused(name: str, segments: Tensor) -> None:
    mixer: Any = make(CONFIGS[name])
    with pytest.raises((ShapeError, TypeError), match=r"segments"):
        mixer(inputs(1, 4), None, segments)


def test_a_cache_that_autograd_has_kept_is_not_written_behind() -> None:
    mixer: Any = make(CONFIGS["softmax"])
    mixer.k_proj.requires_grad_(False)
    mixer.v_proj.requires_grad_(False)
    y, state = mixer(inputs(1, 3), mixer.initial_state(1))
    z, _ = mixer(inputs(1, 2, seed=2), state)
    (y.sum() + z.sum()).backward()


@pytest.mark.parametrize("name", ["softmax", "bilinear", "retention"])
def test_a_model_cast_to_bfloat16_keeps_its_positions_and_decays(name: str) -> None:
    mixer: Any = make(CONFIGS[name])
    exact = [c.values.float().clone() for c in mixer.modules() if isinstance(c, Constants)]
    mixer.bfloat16()
    kept = [c.values for c in mixer.modules() if isinstance(c, Constants)]
    assert len(kept) == len(exact) > 0
    assert all(torch.equal(a, b) for a, b in zip(exact, kept, strict=True))
