"""The split is by document: a law that a splitter by window breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorformer.config.schema import Data
from tensorformer.data.split import PARTS, Part, part
from tensorformer.errors import ConfigError

DATA = Data(validation=0.3, tuning=0.2)
TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(2_000)]

Splitter = Callable[[list[str]], list[Part]]


def by_content(texts: list[str]) -> list[Part]:
    return [part(text, DATA) for text in texts]


def by_window(texts: list[str]) -> list[Part]:
    """Broken on purpose: every tenth stretch of 64 characters is for validation, wherever documents begin."""
    starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
    return ["validation" if start // 64 % 10 == 0 else "train" for start in starts]


def check_split(split: Splitter, texts: list[str], more: list[str]) -> None:
    """A document's part depends on what it says: not on its place, its neighbours, nor how often it occurs."""
    expected = dict(zip(texts, split(texts), strict=True))
    for order in (texts[::-1], more + texts, texts + texts):
        for text, found in zip(order, split(order), strict=True):
            assert expected.setdefault(text, found) == found


@given(st.lists(st.text(), max_size=20), st.lists(st.text(), max_size=20))
def test_the_split_is_by_document(texts: list[str], more: list[str]) -> None:
    check_split(by_content, texts, more)


def test_a_splitter_by_window_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_split(by_window, TEXTS[:50], TEXTS[50:60])


def test_the_shares_are_kept() -> None:
    parts = by_content(TEXTS)
    for name, share in zip(PARTS, (0.5, 0.3, 0.2), strict=True):
        assert abs(parts.count(name) / len(parts) - share) < 0.05


def test_the_split_never_changes() -> None:
    assert [part(text, DATA) for text in ("a", "b", "g", "ñ")] == GOLDEN


GOLDEN = ["train", "validation", "tuning", "validation"]


def test_a_share_moves_documents_only_to_and_from_train() -> None:
    for text in TEXTS:
        before, after = part(text, DATA), part(text, Data(validation=0.5, tuning=0.2))
        assert before == after or (before, after) == ("train", "validation")


def test_shares_must_leave_something_to_train_on() -> None:
    with pytest.raises(ConfigError, match=r"0.5 \+ 0.5 leaves nothing to train on"):
        part("x", Data(validation=0.5, tuning=0.5))
