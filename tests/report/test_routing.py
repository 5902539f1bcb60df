"""The files of a study of routing: every figure and number, nothing unescaped, and the page as a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser

from tensorformer.report import routing_charts as charts
from tensorformer.report import routing_series as series
from tensorformer.report.routing import write_routing
from tensorformer.report.routing_figures import FIGURES, figures
from tensorformer.report.routing_table import tables
from tensorformer.report.theme import PAGE
from tensorformer.study.routing import routing
from tensorformer.study.routing_meter import CURVES
from tensorformer.study.routing_result import Head, Routing
from tests.report.report_browser import NEEDS_BROWSER, problems
from tests.report.report_factory import UNSAFE
from tests.report.test_report import Reader, png_size
from tests.study.routing_models import SOFTMAX, linear, measured

BROWSER = [pytest.mark.real, NEEDS_BROWSER]


@pytest.fixture(scope="module")
def pair() -> Routing:
    """A softmax run and a hybrid, of random weights."""
    runs = [measured(SOFTMAX, name="softmax"), measured(linear("bilinear"), SOFTMAX, name="hybrid")]
    return routing(runs, "a text")


@pytest.fixture(scope="module")
def page(pair: Routing, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_routing(pair, tmp_path_factory.mktemp("routing"))


def test_the_files(pair: Routing, page: Path) -> None:
    assert {path.name for path in page.parent.iterdir()} == {"routing.html", *(f.png for f in FIGURES)}
    for figure in FIGURES:
        width, height = png_size(page.parent / figure.png)
        assert width > 1000
        assert height > 500
    read = Reader(page)
    assert read.open == []
    for figure in FIGURES:
        assert figure.title in read.words
        assert " ".join(figure.caption.split()) in read.words
    for text in (*pair.findings, *pair.legend, *pair.legend.values(), "hybrid · m0", "trained on 16"):
        assert " ".join(text.split()) in read.words
    labels = [attrs["aria-label"] or "" for tag, attrs in read.tags if attrs.get("class") == "chart"]
    assert len(labels) == len(FIGURES)
    assert all("softmax from " in label and "hybrid · m1 from " in label for label in labels)
    addresses = [value for _, attrs in read.tags for key, value in attrs.items() if key in ("src", "href")]
    assert addresses == [f.png for f in FIGURES]


def test_every_line_is_the_quartiles_of_its_heads(pair: Routing) -> None:
    lines = series.all_series(pair)
    assert [line.label for line in lines] == ["softmax", "hybrid · m0", "hybrid · m1"]
    heads = pair.runs[1].layers[0].heads
    (row,) = [r for r in series.curves(pair, "row_mass") if r["id"] == "v1" and r["seen"] == "3–4"]
    low, high = sorted(head.curves["row_mass"][2] or math.nan for head in heads)
    assert row["value"] == pytest.approx((low + high) / 2)
    assert row["low"] == pytest.approx(low + (high - low) / 4)
    assert row["keys"] == 3.5
    gains = [r for r in series.exchanges(pair, "added") if r["id"] == "v0"]
    assert [r["value"] for r in gains] == pytest.approx([1.0] * len(gains), abs=1e-4)
    assert gains[0]["seen"] == "0% to 10%"


def test_the_table(pair: Routing) -> None:
    softmax, hybrid = tables(pair)
    assert [title for title, _ in softmax.heads] == ["At 12–16 keys", "At 33–40 keys", "When changed"]
    ((name, cells),) = softmax.lines
    assert name == "0 m0"
    titles = [title for _, titles in softmax.heads for title in titles]
    shown = dict(zip(titles[::-1], cells[::-1], strict=True))  # the last of two of one title
    assert shown["Mass"].main == "1.00"
    assert shown["Lost to an added key"].main == "1.00"
    assert shown["Log-odds at 4×"].main == "4.00"
    assert [name for name, _ in hybrid.lines] == ["0 m0", "1 m1"]


def test_log_ticks_are_round_and_inside() -> None:
    assert charts._log_ticks(0.07, 12) == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])
    assert charts._log_ticks(0.02, 4000) == pytest.approx([0.1, 1, 10, 100, 1000])


def _changed(result: Routing, change: dict[str, Any]) -> Routing:
    """Return a study in which every head has these values instead."""

    def head(old: Head) -> Head:
        return dataclasses.replace(old, **change)

    runs = [
        dataclasses.replace(
            run, layers=[dataclasses.replace(layer, heads=[head(h) for h in layer.heads]) for layer in run.layers]
        )
        for run in result.runs
    ]
    return dataclasses.replace(result, runs=runs)


def bare(result: Routing) -> Routing:
    """Return a study whose heads say nothing but who competes."""
    n, far = len(result.runs[0].keys), len(result.runs[0].distances)
    nothing = {"curves": dict.fromkeys(CURVES, [None] * n), "distance": [None] * far}
    return _changed(result, nothing | {"log_odds": [None] * 7, "top_share": [None] * 7})


def test_figures_without_data_are_left_out_and_older_pictures_replaced(pair: Routing, tmp_path: Path) -> None:
    for figure in FIGURES:
        (tmp_path / figure.png).write_bytes(b"of an earlier study")
    kept = {"added.png", "grown.png", "output.png"}
    assert {f.png for f in figures(bare(pair))} == kept
    write_routing(bare(pair), tmp_path)
    once = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(once) == {"routing.html", *kept}
    write_routing(bare(pair), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == once
    assert Reader(tmp_path / "routing.html").rows[2][1] == "—"


def test_a_log_axis_leaves_out_what_it_cannot_show(pair: Routing) -> None:
    zero = _changed(pair, {"distance": [0.0] * len(pair.runs[0].distances)})
    assert "distance" not in {f.key for f in figures(zero)}


def test_a_run_alone_has_no_key(tmp_path: Path) -> None:
    alone = routing([measured(SOFTMAX, t=16, name="alone")], "a text")
    text = write_routing(bare(alone), tmp_path).read_text("utf-8")
    assert '<ul class="legend"' not in text
    drawing = FIGURES[4].draw(alone, PAGE)
    assert drawing is not None
    assert "training context" not in json.dumps(drawing.datasets)  # nothing is beyond it


@pytest.fixture(scope="module")
def hostile(pair: Routing, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study under names that would break out of it."""
    runs = [dataclasses.replace(run, name=f"{i}{UNSAFE}") for i, run in enumerate(pair.runs)]
    return write_routing(routing(runs, UNSAFE), tmp_path_factory.mktemp("hostile"))


@pytest.mark.slow
def test_names_are_escaped(page: Path, hostile: Path) -> None:
    calm, unsafe = Reader(page), Reader(hostile)
    assert [tag for tag, _ in calm.tags] == [tag for tag, _ in unsafe.tags]
    assert " ".join(UNSAFE.split()) in unsafe.words
    inside = re.search(r'id="charts">(.*?)</script>', hostile.read_text("utf-8"), re.S)
    assert inside is not None
    assert "<" not in inside[1]
    rows = [row for spec in json.loads(inside[1]).values() for data in spec["datasets"].values() for row in data]
    names = {row["variant"] for row in rows if "variant" in row}
    assert names == {f"0{UNSAFE}", f"1{UNSAFE} · m0", f"1{UNSAFE} · m1"}


class TestInBrowser:
    """The page as a reader meets it."""

    pytestmark = BROWSER

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 390])
    def test_it_is_sound(self, browser: Browser, page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
        assert problems(browser, page, len(FIGURES), width, scheme) == []

    def test_hostile_names_on_a_phone(self, browser: Browser, hostile: Path) -> None:
        assert problems(browser, hostile, len(FIGURES), 390, "light") == []

    def test_a_lost_chart_is_caught(self, browser: Browser, page: Path, tmp_path: Path) -> None:
        broken = tmp_path / "routing.html"
        broken.write_text(page.read_text("utf-8").replace('"chart-entropy":', '"chart-lost":', 1), encoding="utf-8")
        found = problems(browser, broken, len(FIGURES), 390, "light", wait_ms=6_000)
        assert any("charts drawn" in problem for problem in found)
