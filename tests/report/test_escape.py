"""Text that tries to break out of Markdown, of a code block, and of a script element."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tensorformer.report import escape

HOSTILE = st.text(alphabet="ab1 .)-+=#*_`~[]()!<>&|\\$\"'/:\n\t", min_size=1, max_size=30)


def shown(source: str) -> str:
    """Return the text of the one paragraph that ``source`` makes, and fail if it makes anything else."""
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    children = tokens[1].children or []
    assert {child.type for child in children} <= {"text", "text_special"}, children
    return "".join(child.content for child in children)


@given(HOSTILE)
def test_markdown_shows_the_text_itself(text: str) -> None:
    expected = " ".join(text.split())
    if expected:
        assert shown(escape.markdown(text)) == expected


@given(HOSTILE)
def test_a_table_cell_stays_a_cell(text: str) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(f"| a | b |\n| - | - |\n| {escape.markdown(text)} | x |\n")
    cells = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "td_open"]
    assert len(cells) == 2
    assert "".join(child.content for child in cells[0].children or []) == " ".join(text.split())


@given(st.text(alphabet="`~a\n ", max_size=40))
def test_a_fence_holds(text: str) -> None:
    fence = escape.fence(text)
    tokens = MarkdownIt("commonmark").parse(f"{fence}toml\n{text}\n{fence}\n\nafter\n")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


@given(st.text())
def test_json_cannot_leave_its_script(text: str) -> None:
    said = escape.script_json({"a": text})
    assert json.loads(said) == {"a": text}
    assert not set("<>&\u2028\u2029") & set(said)


def test_json_refuses_what_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        escape.script_json({"a": float("nan")})
