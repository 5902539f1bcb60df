"""What a report's files say: every number, nothing unescaped, the same bytes every time, and all the edges."""

from __future__ import annotations

import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

from tensorformer.lab.results import Comparison
from tensorformer.report import quantities as q
from tensorformer.report import series, table, words, write_report
from tests.report.report_factory import NAMES, UNSAFE, make_comparison

PNGS = {"difference", "curves", "gap", "context", "wall_clock", "data_to_match", "summary"}
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """A page as its elements, its texts, and the cells of its first table."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)
            if {"th", "td"} & set(self.open):
                self.rows[-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def markdown_text(path: Path) -> str:
    """Return what a reader of the Markdown sees."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8")):
        for child in token.children or [token]:
            found.append("\n" if child.type == "softbreak" else child.content)
    return " ".join("".join(found).split())


def png_size(path: Path) -> tuple[int, int]:
    """Return a picture's width and height; fail if it is no PNG or has but one colour."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    at, pixels = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += 12 + length
    assert len(set(zlib.decompress(pixels))) > 40
    return width, height


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return make_comparison()


@pytest.fixture(scope="module")
def page(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(comparison, tmp_path_factory.mktemp("report"))


def expected_numbers(comparison: Comparison) -> list[str]:
    """Return the texts that both files must hold."""
    found = [words.answer(comparison), *comparison.notes, *comparison.machine.values(), series.source(comparison)]
    for v in comparison.variants:
        found += [v.name, v.description, q.scaled(v.n_params, "", 0.1), q.scaled(v.flops_per_token, "FLOP", 0.1)]
        assert v.bits_per_byte is not None
        found += [*q.level_parts(v.loss), *q.level_parts(v.bits_per_byte), q.ratio(v.data_to_match)]
        found += [q.scaled(v.tokens_per_second, ""), q.size(v.peak_memory), f"{v.n_params:,}", f"{v.flops_per_token:,}"]
        found += [f"{width:,}" for width in v.widths.values()] + [
            q.number(x, 4) for x in v.learning_rate_losses.values()
        ]
        found += [q.number(s.loss, 4) for s in v.seeds]
        found += [q.number(s.bits_per_byte, 4) for s in v.seeds if s.bits_per_byte is not None]
        if v.difference is not None:
            found += [q.signed(v.difference.estimate.mean, q.decimals(v.difference.estimate))]
            found += [*words.verdict(v.difference, comparison.delta), q.interval(v.difference.estimate)]
            found += [q.signed(value, 4) for value in v.difference.per_seed.values()]
    return found


def test_both_files_hold_every_number(comparison: Comparison, page: Path) -> None:
    reader, text = Reader(page), markdown_text(page.with_suffix(".md"))
    for expected in expected_numbers(comparison):
        wanted = " ".join(expected.split())
        assert wanted in reader.words, expected
        assert wanted in text, expected
    for v in comparison.variants:
        assert v.config.strip() in page.with_suffix(".md").read_text(encoding="utf-8")
    assert "tensorformer compare recipes/demo.toml" in reader.words


def test_the_answer_is_one_sentence_of_the_data(comparison: Comparison) -> None:
    said = words.answer(comparison).replace(q.THIN, " ")
    assert said.startswith("Against swiglu (")
    assert "bilinear is undecided (+0.005 nats, 95 % −0.004 … +0.015; ≈ 9 seeds would decide)" in said
    assert "geglu is the same within δ = 0.01" in said
    assert "hybrid 3:1 is worse" in said
    many = words.answer(make_comparison({f"v{i}": "" for i in range(12)}))
    assert "of 11 are worse (v3, v4" in many


def test_the_table_has_the_baseline_first(comparison: Comparison, page: Path) -> None:
    turned = table.lines(msgspec.structs.replace(comparison, variants=comparison.variants[::-1]))
    assert [line.variant.name for line in turned] == ["swiglu", *list(NAMES)[:0:-1]]
    assert {len(row) for row in Reader(page).rows[:6]} == {11}


def test_the_page_is_one_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 2_000_000
    reader = Reader(page)
    assert not [tag for tag, at in reader.tags if tag in ("link", "img", "iframe") or "src" in at or "style" in at]
    assert {at["href"] for tag, at in reader.tags if tag == "a"} == {f"{key}.png" for key in PNGS - {"summary"}} | {
        "report.md"
    }
    assert text.count("<script") == 3
    assert "@import" not in text
    assert [at["lang"] for tag, at in reader.tags if tag == "html"] == ["en"]
    assert all(at.get("aria-label") for tag, at in reader.tags if at.get("role") == "img")
    assert sum(tag == "table" for tag, _ in reader.tags) == sum(tag == "caption" for tag, _ in reader.tags)


def test_pictures_are_drawn(page: Path) -> None:
    sizes = {path.stem: png_size(path) for path in page.parent.glob("*.png")}
    assert set(sizes) == PNGS
    assert all(width >= 1200 and height >= 300 for width, height in sizes.values())
    markdown = page.with_suffix(".md").read_text(encoding="utf-8")
    assert all(f"]({key}.png)" in markdown for key in PNGS - {"summary"})


def test_the_same_comparison_gives_the_same_bytes(comparison: Comparison, page: Path, tmp_path: Path) -> None:
    write_report(comparison, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        p.name: p.read_bytes() for p in page.parent.iterdir()
    }


def test_no_text_is_markup(tmp_path: Path) -> None:
    made = make_comparison({f"{i}{UNSAFE}": UNSAFE for i in range(2)}, seeds=2)
    variants = [msgspec.structs.replace(v, config=f"{UNSAFE}\n```\n# x\n", widths={UNSAFE: 3}) for v in made.variants]
    assert made.corpus is not None
    corpus = msgspec.structs.replace(made.corpus, source=UNSAFE, tokenizer=UNSAFE)
    made = msgspec.structs.replace(made, name=UNSAFE, created=UNSAFE, notes=[UNSAFE], machine={UNSAFE: UNSAFE})
    made = msgspec.structs.replace(made, variants=variants, corpus=corpus)
    page = write_report(made, tmp_path)
    reader = Reader(page)
    assert page.read_text(encoding="utf-8").count("<script") == 3
    assert not [tag for tag, at in reader.tags if tag == "img" or any(name.startswith("on") for name in at)]
    assert not reader.open
    assert " ".join(UNSAFE.split()) in reader.words
    source = page.with_suffix(".md").read_text(encoding="utf-8")
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        for child in [token, *(token.children or [])]:
            if child.type in ("html_block", "html_inline"):
                assert child.content.strip() in (
                    "<br>",
                    "</details>",
                    "<details><summary>Configuration (TOML)</summary>",
                )
            if child.type == "link_open":
                assert child.attrs["href"] == "report.html"


def bare(names: dict[str, str], seeds: int, scale: float = 1.0) -> Comparison:
    """Return a comparison without data-to-match, grid, machine or notes, evaluated at one context only."""
    made = make_comparison(names, seeds, scale)
    variants = [
        msgspec.structs.replace(
            v,
            data_to_match=None,
            time_to_match=None,
            learning_rate_losses={},
            context_losses={256: v.context_losses[256]},
        )
        for v in made.variants
    ]
    return msgspec.structs.replace(made, variants=variants, baseline_curve={}, machine={}, notes=[], match="none")


def test_one_seed_one_context_and_no_data_to_match(tmp_path: Path) -> None:
    made = bare({"a": "", "b": ""}, seeds=1)
    (tmp_path / "data_to_match.png").write_bytes(b"of an earlier report")
    reader = Reader(write_report(made, tmp_path))
    assert "one seed has no interval" in reader.words
    assert "t-intervals" not in reader.words
    assert "±" not in " ".join(reader.rows[1] + reader.rows[2])
    assert "Data to match is absent" in reader.words
    assert {len(row) for row in reader.rows[:3]} == {9}
    assert {p.stem for p in tmp_path.glob("*.png")} == PNGS - {"context", "data_to_match"}


def test_a_baseline_alone_without_curves(tmp_path: Path) -> None:
    made = bare({"swiglu": "alone"}, seeds=2)
    seeds = [msgspec.structs.replace(s, curve=[]) for s in made.variants[0].seeds]
    made = msgspec.structs.replace(made, variants=[msgspec.structs.replace(made.variants[0], seeds=seeds)])
    reader = Reader(write_report(made, tmp_path))
    assert "There is nothing to compare it with." in reader.words
    assert {p.stem for p in tmp_path.glob("*.png")} == set()
    none = [msgspec.structs.replace(made.variants[0], context_losses={})]
    reader = Reader(write_report(msgspec.structs.replace(made, variants=none), tmp_path))
    assert not list(tmp_path.glob("*.png"))
    assert "Figures drawn" not in reader.words
    assert not [tag for tag, _ in reader.tags if tag == "script"]


def test_twelve_long_names_and_hardly_a_difference(tmp_path: Path) -> None:
    names = {f"{'x' * 78}{i:02d}": "" for i in range(12)}
    page = write_report(bare(names, seeds=3, scale=1e-7), tmp_path)
    assert page.stat().st_size < 2_000_000
    reader = Reader(page)
    assert all(name in reader.words for name in names)
    assert len({at["title"] for tag, at in reader.tags if tag == "button"}) == 12
    assert png_size(tmp_path / "summary.png")[0] < 2400


def test_a_chosen_rate_at_the_end_of_the_grid_is_said() -> None:
    made = make_comparison({"a": "", "b": ""})
    edge = msgspec.structs.replace(made.variants[1], learning_rate=0.004)
    said = words.notes(msgspec.structs.replace(made, variants=[made.variants[0], edge]))
    assert [note for note in said if "largest tried" in note] == [
        "b: the chosen learning rate, 0.004, is the largest tried; a better one may lie beyond."
    ]


@pytest.mark.parametrize(("needed", "said"), [(9, "≈ 9 seeds"), (None, "over 1,000 seeds")])
def test_a_lucky_verdict_is_said(needed: int | None, said: str) -> None:
    made = make_comparison({"a": "", "b": "", "c": "", "d": ""})
    assert not [note for note in words.notes(made) if "luck" in note]
    worse = made.variants[3]
    assert worse.difference is not None
    assert worse.difference.verdict == "worse"
    difference = msgspec.structs.replace(worse.difference, seeds_to_decide=needed)
    variants = [*made.variants[:3], msgspec.structs.replace(worse, difference=difference)]
    found = [note for note in words.notes(msgspec.structs.replace(made, variants=variants)) if "luck" in note]
    assert len(found) == 1
    assert found[0].startswith("d: the verdict “worse” came with luck")
    assert said in found[0]


def test_every_variant_looks_different() -> None:
    from tensorformer.report.theme import looks

    names = [*NAMES, *(f"v{i}" for i in range(9))]
    found = looks(names, "swiglu")
    assert found["swiglu"].colour == "ink"
    assert len({(look.colour, look.dash) for look in found.values()}) == len(names)
