"""Text from a recipe or a machine, made harmless: for Markdown, for code blocks, and for JSON inside a page."""

from __future__ import annotations

import json
import re
from typing import Any

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_IN_JSON = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def markdown(text: str) -> str:
    """Return text that GitHub's Markdown shows as it is, on one line, also inside a table."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*\[\]|~$#!])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    text = re.sub(r"^(\d*)([-+=.)])(?=[\s=-]|$)", r"\1\\\2", text)  # not a list, rule or heading
    return re.sub(r"[&<>]", lambda found: _ENTITIES[found[0]], text)


def fence(text: str) -> str:
    """Return a fence that no line of ``text`` can close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(3, longest + 1)


def script_json(value: Any) -> str:
    """Return JSON that cannot leave the script element it is put into."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: _IN_JSON[found[0]], text)
