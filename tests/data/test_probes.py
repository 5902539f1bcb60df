"""Probes are pure, hold what their rules say, and are known exactly by one who knows the rules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.config.load import load_config
from tensorformer.config.schema import Induction, Needle, Probe, Recall, SelectiveCopying
from tensorformer.data.batches import Windows
from tensorformer.data.examples import held_out, open_examples, training_batches
from tensorformer.data.probe_draws import draw
from tensorformer.data.probe_tasks import UNSCORED, slot_weights, task_of
from tensorformer.data.probes import GeneratedProbe
from tensorformer.errors import ConfigError
from tests.data.probe_recipe import TINY_PROBE, tiny_probe
from tests.recipes import RECIPES

Rows = list[list[int]]


@st.composite
def recalls(draws: st.DrawFn) -> tuple[Probe, int]:
    pairs = draws(st.integers(1, 9))
    probe = Recall(
        pairs=pairs,
        keys=draws(st.integers(max(2, pairs), 20)),
        values=draws(st.integers(2, 12)),
        power=draws(st.sampled_from([0.01, 0.3, 1.0, 3.0])),
    )
    return probe, draws(st.integers(3 * pairs, 3 * pairs + 40))


@st.composite
def inductions(draws: st.DrawFn) -> tuple[Probe, int]:
    shortest = draws(st.integers(2, 9))
    longest = draws(st.integers(shortest, 15))
    probe = Induction(shortest=shortest, longest=longest, symbols=draws(st.integers(longest, 20)))
    return probe, draws(st.integers(longest + 1, 63))


@st.composite
def copyings(draws: st.DrawFn) -> tuple[Probe, int]:
    copied = draws(st.integers(1, 9))
    return SelectiveCopying(copied=copied, symbols=draws(st.integers(2, 9))), draws(st.integers(2 * copied, 63))


@st.composite
def needles(draws: st.DrawFn) -> tuple[Probe, int]:
    low = draws(st.floats(0, 1))
    probe = Needle(
        depths=(low, draws(st.floats(low, 1))), keys=draws(st.integers(1, 5)), symbols=draws(st.integers(2, 9))
    )
    return probe, draws(st.integers(3, 63))


PROBES = st.one_of(recalls(), inductions(), copyings(), needles())
EACH: dict[str, tuple[Probe, int]] = {
    "recall": (Recall(pairs=7, keys=9, values=5), 63),
    "induction": (Induction(shortest=3, longest=11, symbols=17), 63),
    "selective_copying": (SelectiveCopying(copied=5, symbols=7), 63),
    "needle": (Needle(keys=3, symbols=7), 63),
}


def rows(windows: Windows) -> tuple[Rows, Rows]:
    inputs, targets = windows
    return inputs.tolist(), targets.tolist()


# Solvers that share nothing with those of the package: they look at a whole row at once.


def recall_by_hand(probe: Recall, row: list[int]) -> dict[int, int]:
    paired = dict(zip(row[0 : 2 * probe.pairs : 2], row[1 : 2 * probe.pairs : 2], strict=True))
    return {t: paired[row[t]] for t in range(2 * probe.pairs, len(row)) if row[t]}


def induction_by_hand(row: list[int]) -> dict[int, int]:
    period = next((p for p in range(2, len(row)) if row[p] == row[0]), len(row))
    assert len(set(row[:period])) == period
    assert all(row[t] == row[t - period] for t in range(period, len(row)))
    return {t: row[t + 1 - period] for t in range(period, len(row))}


def copying_by_hand(probe: SelectiveCopying, row: list[int]) -> dict[int, int]:
    symbols = [token for token in row if token >= 2]
    assert row[-probe.copied :] == [1] * probe.copied
    return {len(row) - probe.copied + i: symbol for i, symbol in enumerate(symbols)}


def needle_by_hand(probe: Needle, row: list[int]) -> dict[int, int]:
    where = [t for t, token in enumerate(row) if token <= probe.keys]
    assert len(where) == 2
    assert where[1] == len(row) - 1
    assert row[where[0]] == row[-1]
    assert probe.depths[0] * (len(row) - 3) - 0.5 <= where[0] <= probe.depths[1] * (len(row) - 3) + 0.5
    return {where[1]: row[where[0] + 1]}


def by_hand(probe: Probe, row: list[int]) -> dict[int, int]:
    match probe:
        case Recall():
            return recall_by_hand(probe, row)
        case Induction():
            return induction_by_hand(row)
        case SelectiveCopying():
            return copying_by_hand(probe, row)
        case Needle():
            return needle_by_hand(probe, row)


Solver = Callable[[Sequence[int]], list[int]]


def check_known(windows: Windows, solve: Solver) -> None:
    """Fail unless an answer is asked for exactly where the tokens so far decide it, and is that one."""
    for row, wanted in zip(*rows(windows), strict=True):
        assert solve(row) == wanted
        middle = len(row) // 2  # and the second half of the row has no part in what the first decides
        assert solve(row[:middle]) == wanted[:middle]


@given(case=PROBES, seed=st.integers(0, 2**40), first=st.integers(0, 2**40))
def test_every_answer_is_the_one_the_rules_give(case: tuple[Probe, int], seed: int, first: int) -> None:
    probe, context = case
    windows = GeneratedProbe(probe).examples("train", seed, first, 3, context)
    assert [tuple(part.shape) for part in windows] == [(3, context)] * 2
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in windows)
    for row, targets in zip(*rows(windows), strict=True):
        assert {t: answer for t, answer in enumerate(targets) if answer != UNSCORED} == by_hand(probe, row)
        assert all(0 <= token < probe.vocab_size for token in row)
    check_known(windows, task_of(probe).solve)


@pytest.mark.parametrize("kind", EACH)
def test_the_check_catches_answers_that_are_off_by_one_or_not_decided(kind: str) -> None:
    probe, context = EACH[kind]
    task = task_of(probe)
    inputs, targets = GeneratedProbe(probe).batch(0, context, 5, 0)
    scored = targets != UNSCORED
    late = targets.roll(1, dims=1)
    more = targets.clone()
    more[:, 0] = 1  # nothing can be known after the first token
    for broken in (late, more, torch.where(scored, 1, targets)):
        with pytest.raises(AssertionError):
            check_known((inputs, broken), task.solve)


def check_pure(probe: GeneratedProbe, context: int) -> None:
    """Fail unless an example depends on nothing but its part, seed, context and number."""
    whole = probe.examples("train", 3, 0, 40, context)
    for first, n in ((39, 1), (0, 7), (7, 20), (0, 1), (12, 1)):
        for found, wanted in zip(probe.examples("train", 3, first, n, context), whole, strict=True):
            assert torch.equal(found, wanted[first : first + n])


class Remembering(GeneratedProbe):
    """Broken on purpose: examples come from a generator that remembers how often it was asked."""

    asked = 0

    def examples(self, part, seed, first, n, context):
        self.asked += n
        return super().examples(part, seed, self.asked, n, context)


@pytest.mark.parametrize("kind", EACH)
def test_an_example_is_a_function_of_its_number(kind: str) -> None:
    probe, context = EACH[kind]
    check_pure(GeneratedProbe(probe), context)
    with pytest.raises(AssertionError):
        check_pure(Remembering(probe), context)


@pytest.mark.parametrize("kind", EACH)
def test_steps_seeds_and_parts_share_no_example(kind: str) -> None:
    probe, context = EACH[kind]
    source = GeneratedProbe(probe)
    seen: set[tuple[int, ...]] = set()
    for windows in (
        *(source.batch(step, context, 8, seed) for step in range(5) for seed in (0, 1, 2**33)),
        *source.held_out("validation", context, 40 * context),
        *source.held_out("tuning", context, 40 * context),
    ):
        found = {tuple(row) for row in rows(windows)[0]}
        assert len(found) == len(windows[0])
        assert not found & seen
        seen |= found
    with pytest.raises(ValueError, match="counted from 0"):
        source.batch(-1, context, 8, 0)


@pytest.mark.parametrize("kind", EACH)
def test_what_runs_are_judged_on_is_always_the_same_and_as_much_as_asked(kind: str) -> None:
    probe, context = EACH[kind]
    source, more = GeneratedProbe(probe), 10_000 * context
    few = torch.cat([inputs for inputs, _ in source.held_out("validation", context, 300 * context + 5)])
    many = torch.cat([inputs for inputs, _ in source.held_out("validation", context, more)])
    assert few.shape == (300, context)
    assert many.shape == (10_000, context)
    assert torch.equal(few, many[:300])
    assert sum(len(inputs) for inputs, _ in source.held_out("tuning", context, 1)) == 1


@pytest.mark.parametrize("kind", EACH)
def test_a_perfect_learner_gets_all_of_it_and_a_guess_as_much_as_is_said(kind: str) -> None:
    probe, context = EACH[kind]
    source, limit = GeneratedProbe(probe), 2_000 * context
    perfect, answers = source.perfect("validation", context, limit)
    targets = torch.cat([targets for _, targets in source.held_out("validation", context, limit)])
    asked = targets[targets != UNSCORED]
    assert (perfect, answers) == (1.0, len(asked))
    frequency = asked.bincount() / len(asked)  # of the best guess that reads nothing
    assert float(frequency.max()) == pytest.approx(source.task.chance, abs=5 * math.sqrt(0.25 / len(asked)) + 0.01)
    assert int((frequency > 0).sum()) == round(1 / source.task.chance)


@pytest.mark.parametrize("kind", EACH)
def test_longer_contexts_are_harder_to_reach_but_as_well_known(kind: str) -> None:
    probe, context = EACH[kind]
    source = GeneratedProbe(probe)
    for length in (context, 2 * context, 8 * context + 1):
        windows = source.examples("validation", 0, 0, 4, length)
        assert windows[0].shape == (4, length)
        check_known(windows, source.task.solve)


@pytest.mark.parametrize("kind", EACH)
def test_no_draw_is_left_over_and_none_is_missing(kind: str) -> None:
    probe, context = EACH[kind]
    task = task_of(probe)
    draws = draw((0, 0), 0, 3, task.n_draws(context))
    task.make(draws, context)
    assert draws.left == 0
    with pytest.raises(ValueError, match="numbers asked for"):
        task.make(draw((0, 0), 0, 3, task.n_draws(context) - 1), context)


GOLDEN = {
    "recall": "830acd3b24b5687e",
    "induction": "b21b45733fc7ac0c",
    "selective_copying": "96ec64236cf72469",
    "needle": "0857c4a20c2eb254",
}


@pytest.mark.parametrize("kind", EACH)
def test_the_examples_of_a_seed_never_change(kind: str) -> None:
    probe, context = EACH[kind]
    windows = GeneratedProbe(probe).batch(2, context, 3, 5)
    assert hashlib.sha256(repr(rows(windows)).encode()).hexdigest()[:16] == GOLDEN[kind]


def test_draws_are_even_and_ranked_by_weight() -> None:
    draws = draw((7,), 11, 20_000, 4 * 5 + 7)
    counts = np.bincount(draws.integers(5, 7).ravel(), minlength=7) / 100_000
    assert counts == pytest.approx([1 / 7] * 7, abs=0.006)
    shares = draws.shares(5)
    assert shares.min() >= 0
    assert shares.max() < 1
    assert shares.mean() == pytest.approx(0.5, abs=0.005)
    orders = draws.arrangement(7)
    assert (np.sort(orders, axis=1) == np.arange(7)).all()
    weights = np.array([1.0, 2.0, 4.0, 8.0, 1.0])
    ranks = draws.ranking(weights)
    assert (np.sort(ranks, axis=1) == np.arange(5)).all()
    first = np.bincount(ranks[:, 0], minlength=5) / 20_000
    assert first == pytest.approx(weights / 16, abs=0.015)
    after = ranks[ranks[:, 0] == 3]  # the second place goes by the weights that are left
    assert np.bincount(after[:, 1], minlength=5) / len(after) == pytest.approx(
        [1 / 8, 1 / 4, 1 / 2, 0, 1 / 8], abs=0.02
    )


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_queries_stand_where_their_power_law_puts_them(power: float) -> None:
    probe, slots = Recall(pairs=1, keys=2, values=2, power=power), 30
    inputs, _ = GeneratedProbe(probe).batch(0, 2 + slots, 20_000, 0)
    asked = (inputs[:, 2:] != 0).int().argmax(dim=1)
    weights = slot_weights(slots, power)
    found = np.bincount(asked.numpy(), minlength=slots) / len(asked)
    assert found == pytest.approx(weights / weights.sum(), abs=0.015)
    assert weights[9] / weights[0] == pytest.approx(10 ** (power - 1))


@pytest.mark.parametrize(
    ("depths", "places"), [((0, 0), {0}), ((1, 1), {60}), ((0.5, 0.5), {30}), ((0.9, 1), set(range(54, 61)))]
)
def test_a_needle_is_as_deep_as_it_says(depths: tuple[float, float], places: set[int]) -> None:
    probe = Needle(depths=depths, keys=1, symbols=4)
    inputs, _ = GeneratedProbe(probe).batch(0, 63, 400, 0)
    assert set((inputs == 1).int().argmax(dim=1).tolist()) == places


def test_probes_with_other_numbers_have_other_fingerprints() -> None:
    kinds: list[Probe] = [probe for probe, _ in EACH.values()]
    kinds += [Recall(pairs=7, keys=9, values=6), Recall(pairs=7, keys=9, values=5, power=1.0)]
    assert len({GeneratedProbe(probe).fingerprint for probe in kinds}) == len(kinds)


def test_text_and_probes_are_opened_alike(home: Path) -> None:
    text = open_examples(load_config("tiny.toml").data)
    (home / "probe.toml").write_text(TINY_PROBE)
    probe = open_examples(load_config("probe.toml").data)
    for examples in (text, probe):
        inputs, targets = training_batches(examples, 16, 3, 0)(5)
        assert inputs.shape == targets.shape == (3, 16)
        assert [x.shape for x, _ in held_out(examples, "tuning", 16, 64)] == [(4, 16)]


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (
            'kind = "recall"\npairs = 6',
            r"\$\.data\.probe\.pairs: 6 pairs and as many queries take 18 tokens of a context of 16",
        ),
        (
            'kind = "recall"\npairs = 3\nkeys = 2',
            r"\$\.data\.probe\.keys: 2 can't be different in 3 pairs; write 3 or more",
        ),
        ('kind = "recall"\npairs = 3\nkeys = 8', r"\$\.model\.vocab_size: 17 is less than the probe's; write 73"),
        ('kind = "recall"\npairs = 3\nvalues = 1', r"Expected `int` >= 2 - at `\$\.data\.probe\.values`"),
        ('kind = "recall"\npairs = 3\nvaleus = 8', r"unknown field `valeus`.*did you mean 'values'"),
        ('kind = "recall"\npairs = 3\npower = 0.0', r"Expected `float` > 0\.0 - at `\$\.data\.probe\.power`"),
        ('kind = "recal"\npairs = 3', r"Invalid value 'recal' - at `\$\.data\.probe\.kind`"),
        ('kind = "recall"', r"missing required field `pairs` - at `\$\.data\.probe`"),
        ('kind = "needle"\ndepths = [0.2, 1.5]', r"Expected `float` <= 1\.0 - at `\$\.data\.probe\.depths\[1\]`"),
        (
            'kind = "needle"\ndepths = [0.9, 0.1]',
            r"\$\.data\.probe\.depths: 0\.9 is above 0\.1; write \[0\.1, 0\.9\]",
        ),
        (
            'kind = "selective_copying"\ncopied = 9',
            r"\$\.data\.probe\.copied: 9 symbols and as many marks take 18 tokens of a context of 16",
        ),
        (
            'kind = "induction"\nshortest = 4\nlongest = 16',
            r"\$\.data\.probe\.longest: a passage of 16 and one token of its return take 17 tokens of a context of 16",
        ),
        ('kind = "induction"\nshortest = 9\nlongest = 8', r"\$\.data\.probe\.shortest: 9 is above longest = 8"),
        (
            'kind = "induction"\nshortest = 4\nlongest = 8\nsymbols = 7',
            r"\$\.data\.probe\.symbols: 7 can't be different in a passage of 8; write 8 or more",
        ),
    ],
)
def test_what_can_not_be_is_one_line_with_the_path_of_the_key(home: Path, probe: str, message: str) -> None:
    Path("probe.toml").write_text(tiny_probe(probe))
    with pytest.raises(ConfigError, match=message) as e:
        load_config("probe.toml")
    assert "\n" not in str(e.value)
    assert str(e.value).startswith("probe.toml: ")


@pytest.mark.parametrize(
    "given", ['data.source="stdlib2"', "data.validation=0.1", 'data.tokenizer={kind="bpe",vocab_size=300}']
)
def test_a_probe_beside_text_is_refused(home: Path, given: str) -> None:
    Path("probe.toml").write_text(TINY_PROBE)
    key = given.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"\$\.{key}: a probe is generated and reads no text; leave one of the two out"
    ):
        load_config("probe.toml", [given])


@pytest.mark.parametrize("kind", ["recall", "induction", "selective-copying", "needle"])
def test_there_is_a_recipe_for_each(kind: str) -> None:
    recipe = load_config(RECIPES / f"probe-{kind}.toml")
    assert recipe.compare is not None
    assert recipe.compare.baseline == "softmax"
    assert recipe.data.probe is not None
    assert recipe.model.vocab_size == recipe.data.probe.vocab_size
    source = open_examples(recipe.data)
    assert isinstance(source, GeneratedProbe)
    for multiple in recipe.compare.contexts:
        assert source.perfect("validation", multiple * recipe.train.context, 8_192)[0] == 1.0
