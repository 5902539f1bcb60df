"""Continuous batching gives token for token what each prompt gives alone; broken ways of it are caught."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tensorformer.errors import ConfigError
from tensorformer.lab import batching, feeding
from tensorformer.lab.batching import ContinuousBatch, Got
from tensorformer.lab.feeding import left_padded, prefill
from tensorformer.nn.state import State, select
from tests.lab.decoding_models import VOCAB, every_model, model, prompt, some_models


class Asked(NamedTuple):
    """A row of a schedule."""

    length: int  # of the prompt
    n_tokens: int
    joins: int  # before which step
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()
    leaves: int | None = None  # before which step it is removed


def alone(name: str, row: Asked) -> list[int]:
    """Return the tokens by the forward pass over the whole text so far, without any state or batch."""
    net, text = model(name), prompt(row.length, row.seed)
    draws, got = torch.Generator().manual_seed(row.seed), []
    for _ in range(row.n_tokens if row.leaves is None else min(row.n_tokens, row.leaves - row.joins)):
        logits = net(torch.tensor([text + got]))[0, -1].float()
        if row.temperature == 0:
            token = int(logits.argmax())
        else:
            p, order = torch.softmax(logits / row.temperature, -1).sort(descending=True, stable=True)
            p[p.cumsum(0) - p >= row.top_p] = 0
            token = int(order[torch.multinomial(p, 1, generator=draws)])
        if token in row.stop:
            break
        got.append(token)
    return got


def together(name: str, rows: list[Asked]) -> list[list[int]]:
    """Return the tokens of a batch that rows join and leave when they say."""
    batch = ContinuousBatch(model(name), VOCAB, piece=3)
    handles: dict[int, int] = {}
    got: list[list[int]] = [[] for _ in rows]
    for step in range(1 + max(r.joins + r.n_tokens for r in rows)):
        for i, r in enumerate(rows):
            if r.joins == step:
                where = prompt(r.length, r.seed)
                handle = batch.add(
                    where, r.n_tokens, temperature=r.temperature, top_p=r.top_p, seed=r.seed, stop=r.stop
                )
                handles[handle] = i
            if r.leaves == step:
                for handle in [h for h in batch.handles if handles[h] == i]:
                    batch.remove(handle)
        for result in batch.step():
            if result.token is not None:
                got[handles[result.handle]].append(result.token)
    assert batch.handles == []
    return got


def check(name: str, rows: list[Asked]) -> None:
    """Fail unless every row gets what it gets alone."""
    for row, got in zip(rows, together(name, rows), strict=True):
        assert got == alone(name, row)


SCHEDULE = [
    Asked(length=7, n_tokens=9, joins=0),
    Asked(length=1, n_tokens=5, joins=0, temperature=1.0, top_p=0.9, seed=3),
    Asked(length=12, n_tokens=4, joins=2, temperature=0.7, top_p=0.8, seed=1),
    Asked(length=3, n_tokens=12, joins=3, temperature=1.5, seed=2, leaves=8),
    Asked(length=2, n_tokens=6, joins=4, seed=5),
]


@every_model
def test_every_mixer_gives_what_it_gives_alone(name: str) -> None:
    check(name, SCHEDULE)


@some_models
@settings(max_examples=5)
@given(data=st.data())
def test_any_schedule_gives_what_rows_give_alone(name: str, data: st.DataObject) -> None:
    def row() -> Asked:
        joins = data.draw(st.integers(0, 5))
        return Asked(
            length=data.draw(st.integers(1, 9)),
            n_tokens=data.draw(st.integers(1, 6)),
            joins=joins,
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            top_p=data.draw(st.sampled_from([0.3, 0.9, 1.0])),
            seed=data.draw(st.integers(0, 4)),
            stop=tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4))),
            leaves=data.draw(st.none() | st.integers(joins + 1, joins + 6)),
        )

    check(name, [row() for _ in range(data.draw(st.integers(1, 5)))])


@every_model
def test_prefill_in_pieces_of_any_size_is_prefill_at_once(name: str) -> None:
    prompts = [prompt(n) for n in (7, 1, 12)]
    whole, state = prefill(model(name), prompts, 12)
    last, _ = model(name).decode(torch.tensor([[1], [2], [3]]), state)
    for i, p in enumerate(prompts):
        torch.testing.assert_close(whole[i], model(name)(torch.tensor([p]))[0, -1], rtol=1e-10, atol=1e-10)
    for piece in (1, 2, 5, 63):
        logits, state = prefill(model(name), prompts, piece)
        torch.testing.assert_close(logits, whole, rtol=1e-10, atol=1e-10)
        following, _ = model(name).decode(torch.tensor([[1], [2], [3]]), state)
        torch.testing.assert_close(following, last, rtol=1e-10, atol=1e-10)


def test_a_long_prompt_is_never_fed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, fed = model("bilinear"), []
    decode = net.decode
    monkeypatch.setattr(net, "decode", lambda t, *rest: (fed.append(t.shape[1]), decode(t, *rest))[1])
    prefill(net, [prompt(257)], 63)
    assert fed == [63, 63, 63, 63, 5]


def test_prompts_end_in_one_column() -> None:
    tokens, real = left_padded([[5], [1, 2, 3]], torch.device("cpu"))
    assert tokens.tolist() == [[0, 0, 5], [1, 2, 3]]
    assert real.tolist() == [[False, False, True], [True, True, True]]


def test_a_row_says_why_it_ended() -> None:
    greedy = alone("gdn", Asked(length=4, n_tokens=6, joins=0))
    batch = ContinuousBatch(model("gdn"), VOCAB)
    stop = greedy[2]
    at = greedy.index(stop)
    a = batch.add(prompt(4), 6, temperature=0, top_p=1, seed=0, stop={stop, VOCAB + 5})
    b = batch.add(prompt(4), at + 2, temperature=0, top_p=1, seed=0)
    assert (a, b) == (0, 1)
    steps = [batch.step() for _ in range(at + 2)]
    assert steps[at] == [Got(a, None, "stop"), Got(b, greedy[at])]
    assert steps[at + 1] == [Got(b, greedy[at + 1], "length")]
    assert batch.step() == []


def test_a_row_that_is_not_finite_leaves_and_the_others_do_not_notice() -> None:
    net = model.__wrapped__("gdn with a window")
    poisoned = VOCAB - 1
    net.embed.weight[poisoned] = torch.nan
    clean = list(range(5))

    def tokens_of(prompts: list[list[int]]) -> list[list[Got]]:
        batch = ContinuousBatch(net, VOCAB - 1)
        handles = [batch.add(p, 6, temperature=1, top_p=1, seed=2) for p in prompts]
        got: list[Got] = []
        while batch.handles:
            got += batch.step()
        return [[g._replace(handle=0) for g in got if g.handle == h] for h in handles]

    both = tokens_of([[1, poisoned, 2], clean])
    assert both[0] == [Got(0, None, "not finite")]
    assert both[1] == tokens_of([clean])[0]
    assert len(both[1]) == 6


def test_tokens_past_the_tokenizers_are_never_drawn() -> None:
    batch = ContinuousBatch(model("bilinear"), 3)
    batch.add([30], 20, temperature=2.0, top_p=1.0, seed=0)
    drawn = [g.token for _ in range(20) for g in batch.step()]
    assert set(drawn) == {0, 1, 2}


def test_a_step_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Asked(length=3, n_tokens=5, joins=0, temperature=1.0)
    batch = ContinuousBatch(model("gdn"), VOCAB)
    batch.add(prompt(3), 5, temperature=1.0, top_p=1.0, seed=0)
    first = batch.step()
    late = batch.add(prompt(9), 2, temperature=0, top_p=1, seed=0)

    def full(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(batching, "prefill", full)
        with pytest.raises(MemoryError):
            batch.step()
    assert batch.handles == [0, late]
    batch.remove(late)
    rest = [g for _ in range(4) for g in batch.step()]
    assert [g.token for g in first + rest] == alone("gdn", row)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, VOCAB]}, f"token {VOCAB}; the model knows 0 to {VOCAB - 1}"),
        ({"prompt": [-1]}, "token -1"),
        ({"n_tokens": 0}, "write 1 or more"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_bad_requests_are_refused_and_leave_the_batch_alone(change: dict[str, Any], words: str) -> None:
    batch = ContinuousBatch(model("bilinear"), VOCAB)
    asked = {"prompt": [1], "n_tokens": 2, "temperature": 0.0, "top_p": 1.0, "seed": 0} | change
    with pytest.raises(ConfigError, match=words):
        batch.add(**asked)
    assert batch.handles == []


def test_rows_that_are_not_there_and_pieces_of_nothing_are_refused() -> None:
    batch = ContinuousBatch(model("bilinear"), VOCAB)
    with pytest.raises(ConfigError, match="row 0 is not in the batch; there are: none"):
        batch.remove(0)
    batch.add([1], 1, temperature=0, top_p=1, seed=0)
    batch.step()
    with pytest.raises(ConfigError, match="not in the batch"):
        batch.remove(0)
    with pytest.raises(ConfigError, match="write 1 or more"):
        prefill(model("bilinear"), [[1]], 0)
    with pytest.raises(ConfigError, match="at least one"):
        prefill(model("bilinear"), [])


# what must be caught


def breaks(name: str) -> bool:
    try:
        check(name, SCHEDULE)
    except (AssertionError, RuntimeError):
        return True
    return False


@some_models
def test_states_that_do_not_move_when_a_row_leaves_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmoved(state: State, rows: torch.Tensor) -> State:
        return select(state, torch.arange(len(rows)))

    monkeypatch.setattr(batching, "select", unmoved)
    assert breaks(name)


@some_models
def test_rows_joined_in_front_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    join = batching.join
    monkeypatch.setattr(batching, "join", lambda a, b: join(b, a))
    assert breaks(name)


@some_models
def test_padding_read_as_text_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = feeding.pieces
    monkeypatch.setattr(feeding, "pieces", lambda tokens, _, size: pieces(tokens, None, size))
    assert breaks(name)


def test_draws_that_rows_share_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.Generator().manual_seed(0)
    seeded = batching.Sampler.seeded
    monkeypatch.setattr(batching.Sampler, "seeded", lambda *a: seeded(*a)._replace(draws=shared))
    assert breaks("bilinear")
