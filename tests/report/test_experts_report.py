"""The page of a comparison of mixtures of experts: what a token meets, and what the experts of every layer did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from playwright.sync_api import Browser

from tensorformer.lab.results import Comparison, ExpertLayer, Variant
from tensorformer.report import expert_series, experts, table, theme, words, write_report
from tensorformer.report import quantities as q
from tensorformer.report.expert_table import HEADS, expert_lines
from tensorformer.report.figures import figures
from tensorformer.report.series import Row
from tests.report.report_browser import NEEDS_BROWSER, problems
from tests.report.report_factory import UNSAFE, expert_layer, make_comparison, with_experts
from tests.report.test_report import PNGS, Reader, bare, markdown_text, png_size

DRAWN = {"load_evenness", "routed_share", "expert_loads"}
BOUNDS = {"4× and more": 4.0, "1½× to 4×": 1.5, "¾× to 1½×": 0.75, "¼× to ¾×": 0.25, "under ¼×": 1e-300, "no token": 0}
Match = Literal["params", "active", "params_and_active", "flops", "none"]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return structs.replace(with_experts(make_comparison()), match="params_and_active")


@pytest.fixture(scope="module")
def page(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(comparison, tmp_path_factory.mktemp("report"))


def at_end(variant: Variant) -> list[list[ExpertLayer]]:
    """Return the experts of the last evaluation, by seed and layer."""
    return [seed.curve[-1].experts for seed in variant.seeds]


def wrong_loads(variant: Variant, rows: list[Row]) -> list[str]:
    """Return everything in the rows of one variant's loads that its data do not say."""
    found = []
    seeds = at_end(variant)
    for position, of_first in enumerate(seeds[0]):
        mine = [row for row in rows if row["layer"] == of_first.layer]
        all_loads = [load * len(of_first.load) for seed in seeds for load in seed[position].load]
        at = 0.0
        for row in mine:
            if row["from"] != pytest.approx(at):
                found.append(f"layer {of_first.layer}: a gap before {row['load']}")
            at = float(row["to"])
        if at != pytest.approx(1):
            found.append(f"layer {of_first.layer}: ends at {at}")
        above = math.inf
        for name, least in BOUNDS.items():
            share = sum(least <= load < above for load in all_loads) / len(all_loads)
            drawn = sum(float(row["to"]) - float(row["from"]) for row in mine if row["load"] == name)
            if drawn != pytest.approx(share):
                found.append(f"layer {of_first.layer}, {name}: {drawn} is not {share}")
            above = least
    return found


def rows_of(comparison: Comparison, make: Callable[[Comparison], list[Row]], name: str) -> list[Row]:
    return [row for row in make(comparison) if row["variant"] == name]


def test_the_bars_say_what_the_loads_are(comparison: Comparison) -> None:
    for variant in comparison.variants:
        assert wrong_loads(variant, rows_of(comparison, expert_series.loads, variant.name)) == []


def test_bars_that_say_something_else_are_caught(comparison: Comparison) -> None:
    variant = comparison.variants[1]
    rows = rows_of(comparison, expert_series.loads, variant.name)
    one_seed = structs.replace(comparison, variants=[structs.replace(variant, seeds=variant.seeds[:1])])
    assert wrong_loads(variant, expert_series.loads(one_seed))
    assert wrong_loads(variant, rows[:-1])
    swapped = {0: 2, 2: 0}
    assert wrong_loads(variant, [row | {"layer": swapped.get(int(row["layer"]), 1)} for row in rows])


@given(st.lists(st.lists(st.integers(0, 400), min_size=7, max_size=7).filter(any), min_size=1, max_size=3))
def test_any_load_is_drawn_whole(counts: list[list[int]]) -> None:
    made = make_comparison({"a": ""}, seeds=len(counts)) if len(counts) < 3 else make_comparison({"a": ""})
    seeds = [
        structs.replace(s, curve=[structs.replace(s.curve[-1], experts=[expert_layer(5, c, 0.5)])])
        for s, c in zip(made.variants[0].seeds, counts, strict=True)
    ]
    variant = structs.replace(made.variants[0], seeds=seeds)
    rows = expert_series.loads(structs.replace(made, variants=[variant]))
    assert wrong_loads(variant, rows) == []
    order = [list(BOUNDS).index(str(row["load"])) for row in rows]
    assert order == sorted(set(order))


@pytest.mark.parametrize(("n", "said"), [(1, "1 of 1"), (16, "16 of 16"), (257, "257 of 257")])
def test_an_even_load_is_one_bar(n: int, said: str) -> None:
    made = make_comparison({"a": ""}, seeds=1)
    even = [structs.replace(made.variants[0].seeds[0].curve[-1], experts=[expert_layer(0, [3] * n, 0.5)])]
    variant = structs.replace(made.variants[0], seeds=[structs.replace(made.variants[0].seeds[0], curve=even)])
    made = structs.replace(made, variants=[variant])
    (row,) = expert_series.loads(made)
    assert (row["load"], row["experts"], row["span"]) == ("¾× to 1½×", said, "1.00×")
    (row,) = expert_series.evenness(made)
    assert row["entropy"] == pytest.approx(1)


def test_the_lines_say_what_the_data_say(comparison: Comparison) -> None:
    for variant in comparison.variants:
        lines = rows_of(comparison, expert_series.evenness, variant.name)
        assert [row["tokens"] for row in lines] == [point.tokens for point in variant.seeds[0].curve]
        for i, row in enumerate(lines):
            by_seed = [sum(e.entropy for e in s.curve[i].experts) / 3 for s in variant.seeds]
            assert row["entropy"] == pytest.approx(sum(by_seed) / len(by_seed))
            assert (row["low"], row["high"]) == pytest.approx((min(by_seed), max(by_seed)))
        shares = rows_of(comparison, expert_series.routed_shares, variant.name)
        assert [row["layer"] for row in shares] == [0, 1, 2]
        for i, row in enumerate(shares):
            by_seed = [seed[i].routed_share for seed in at_end(variant)]
            assert row["share"] == pytest.approx(sum(by_seed) / len(by_seed))
            assert (row["low"], row["high"]) == (min(by_seed), max(by_seed))
            assert abs(float(row["at"]) - i) < 0.5


@pytest.mark.parametrize("to", [theme.PAGE, theme.PNG], ids=["page", "picture"])
def test_the_specifications_hold_these_rows(comparison: Comparison, to: theme.Theme) -> None:
    for draw, make in (
        (experts.load_evenness, expert_series.evenness),
        (experts.routed_share, expert_series.routed_shares),
        (experts.expert_loads, expert_series.loads),
    ):
        drawing = draw(comparison, to)
        assert drawing is not None
        rows = make(comparison)
        drawn = next(
            kept for kept in drawing.datasets.values() if len(kept) == len(rows) and rows[0].keys() <= kept[0].keys()
        )
        by_variant = sorted(rows, key=lambda row: str(row["id"]))
        for row, kept in zip(by_variant, sorted(drawn, key=lambda row: str(row["id"])), strict=True):
            assert {k: kept[k] for k in row} == pytest.approx(row)


def test_both_files_hold_what_the_experts_did(comparison: Comparison, page: Path) -> None:
    reader, text = Reader(page), markdown_text(page.with_suffix(".md"))
    source = page.with_suffix(".md").read_text(encoding="utf-8")
    (note,) = words.experts(comparison)
    expected = [note, table.caption(comparison), *(head.title for head in HEADS)]
    for figure in figures(comparison)[-3:]:
        expected += [figure.title, figure.caption]
        assert figure.label in [at.get("aria-label") for _, at in reader.tags]
    for v in comparison.variants:
        expected += [q.scaled(v.n_active or 0, "", 0.1), f"{v.n_active:,}, those that a token meets"]
        for layer, seeds in enumerate(zip(*at_end(v), strict=True)):
            cells = expert_lines(v)[layer]
            dead = sum(e.dead for e in seeds) / 3
            assert cells == [
                str(layer),
                f"{sum(e.entropy for e in seeds) / 3:.3f}",
                f"{sum(e.max_over_mean for e in seeds) / 3:.2f}",
                f"{dead:.1f} of 16".replace(".0 ", " "),
                f"{sum(e.confidence for e in seeds) / 3:.3f}",
                "0.040",
                q.share(sum(e.routed_share for e in seeds) / 3),
            ]
            assert cells in reader.rows
            assert f"\n| {' | '.join(cells)} |\n".replace(q.THIN, " ") in source
    for wanted in expected:
        assert " ".join(wanted.split()) in reader.words, wanted
        assert " ".join(wanted.split()) in text, wanted
    assert "at the last evaluation, mean over 3 seeds" in reader.words
    assert {p.stem for p in page.parent.glob("*.png")} == PNGS | DRAWN
    assert all(png_size(page.parent / f"{key}.png")[0] >= 1200 for key in DRAWN)


def without_new_fields(made: Comparison) -> Comparison:
    """Return a comparison as it is read from a file that was written before there were mixtures of experts."""
    kept = json.loads(msgspec.json.encode(made))
    for variant in kept["variants"]:
        del variant["n_active"]
        for point in (point for seed in variant["seeds"] for point in seed["curve"]):
            del point["experts"]
    return msgspec.json.decode(json.dumps(kept), type=Comparison)


def test_an_old_file_is_drawn_and_says_nothing_of_experts(tmp_path: Path) -> None:
    made = without_new_fields(make_comparison({"a": "", "b": ""}, seeds=2))
    for name in DRAWN:
        (tmp_path / f"{name}.png").write_bytes(b"of an earlier report")
    reader = Reader(write_report(made, tmp_path))
    assert {p.stem for p in tmp_path.glob("*.png")} == PNGS
    assert "expert" not in reader.words.lower()
    assert not {"Active", "active"} & set(reader.words.split())


def test_nothing_is_drawn_without_experts() -> None:
    made = make_comparison()
    dense = structs.replace(made, variants=[structs.replace(v, n_active=v.n_params) for v in made.variants])
    assert [figure.key for figure in figures(dense)] == [figure.key for figure in figures(made)]
    assert table.columns(dense) == table.columns(made)
    assert words.experts(dense) == []
    for draw in (experts.load_evenness, experts.expert_loads, experts.routed_share):
        assert draw(dense, theme.PAGE) is None


@pytest.mark.parametrize(
    ("match", "under", "said"),
    [
        ("params", {"Parameters": "+7.00 %"}, "under parameters, the distance"),
        ("active", {"Active": "+7.00 %"}, "under active, the distance"),
        ("params_and_active", {"Parameters": "+0.08 %", "Active": "+0.02 %"}, "under parameters and active, the"),
        ("flops", {"Compute": "+7.00 %"}, "under compute, the distance"),
        ("none", {}, ""),
    ],
)
def test_a_distance_stands_under_what_was_matched(
    comparison: Comparison, match: Match, under: dict[str, str], said: str
) -> None:
    variants = [structs.replace(v, remainder=0.07) for v in comparison.variants]
    made = structs.replace(comparison, match=match, variants=variants)
    titles = [column.title for column in table.columns(made)]
    assert titles[:3] == ["Parameters", "Active", "Compute"]
    first, second = ([cell.detail for cell in line.cells[:3]] for line in table.lines(made)[:2])
    assert first == ["", "", ""]
    assert [text.replace(q.THIN, " ") for text in second] == [under.get(title, "") for title in titles[:3]]
    facts = dict(table.facts(made)["Training"])
    assert facts["Matched in"] == table.MATCHED_IN[match]
    caption = table.caption(made)
    assert said in caption
    assert ("the distance from the baseline" in caption) == bool(said)


@pytest.mark.parametrize("match", ["active", "params_and_active"])
def test_dense_models_have_one_count(match: Match) -> None:
    made = structs.replace(make_comparison(), match=match)
    assert table.matched_columns(made) == ["Parameters"]
    assert table.lines(made)[1].cells[0].detail == q.percent(made.variants[1].remainder)


def test_a_dense_variant_beside_mixtures(tmp_path: Path) -> None:
    made = with_experts(make_comparison(), dense=("swiglu", "geglu"))
    reader = Reader(write_report(made, tmp_path))
    assert reader.words.count("Without experts, so not drawn: swiglu, geglu.") == 3
    assert reader.words.count("Experts of ") == 3
    cells = table.lines(made)[0].cells
    assert cells[0].main == cells[1].main
    drawing = experts.load_evenness(made, theme.PNG)
    assert drawing is not None
    assert {row["variant"] for rows in drawing.datasets.values() for row in rows if "variant" in row} == {
        "bilinear", "hybrid 3:1", "bilinear attention",
    }  # fmt: skip
    legends = [layer["encoding"]["color"]["legend"] for layer in _coloured(drawing.chart.to_dict())]
    assert legends
    assert all(legend["values"] == ["bilinear", "hybrid 3:1", "bilinear attention"] for legend in legends)


def _coloured(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [layer for layer in spec["layer"] if "color" in layer["encoding"]]


def test_one_seed_and_a_single_expert(tmp_path: Path) -> None:
    made = with_experts(bare({"a": "", "b": ""}, seeds=1))
    points = made.variants[1].seeds[0].curve
    alone = [structs.replace(p, experts=[expert_layer(3, [9], 1.0, None)]) for p in points]
    variant = structs.replace(
        made.variants[1], seeds=[structs.replace(made.variants[1].seeds[0], curve=alone)], name="one"
    )
    made = structs.replace(made, variants=[made.variants[0], variant])
    reader = Reader(write_report(made, tmp_path))
    assert ["3", "1.000", "1.00", "0 of 1", "0.330", q.ABSENT, f"100.0{q.THIN}%"] in reader.rows
    assert "One seed, so no bars." in reader.words
    assert "mean over 1 seed" not in reader.words
    assert "mean over layers. One seed, so no band." in reader.words


def test_an_evaluation_that_a_seed_lacks_is_left_out(comparison: Comparison) -> None:
    variant = comparison.variants[0]
    lost = [*variant.seeds[0].curve[:-1], structs.replace(variant.seeds[0].curve[-1], experts=[])]
    seeds = [structs.replace(variant.seeds[0], curve=lost), *variant.seeds[1:]]
    made = structs.replace(comparison, variants=[structs.replace(variant, seeds=seeds)])
    assert len(expert_series.evenness(made)) == len(expert_series.evenness(comparison)) / 5 - 1
    assert expert_series.last(made.variants[0]) == {
        e.layer: [s.curve[-2].experts[e.layer] for s in seeds] for e in seeds[0].curve[0].experts
    }


def test_no_name_is_markup(tmp_path: Path) -> None:
    made = with_experts(make_comparison({f"{i}{UNSAFE}": UNSAFE for i in range(3)}, seeds=2), dense=(f"1{UNSAFE}",))
    page = write_report(made, tmp_path)
    reader = Reader(page)
    assert page.read_text(encoding="utf-8").count("<script") == 3
    assert not [tag for tag, at in reader.tags if tag == "img" or any(name.startswith("on") for name in at)]
    assert not reader.open
    assert "Experts of " + " ".join(f"2{UNSAFE}".split()) in reader.words


def test_many_experts_in_many_layers_stay_small(tmp_path: Path) -> None:
    made = make_comparison({f"v{i}": "" for i in range(6)}, seeds=2)
    few = [structs.replace(v, seeds=[structs.replace(s, curve=s.curve[-4:]) for s in v.seeds]) for v in made.variants]
    made = with_experts(structs.replace(made, variants=few), n_experts=256, layers=tuple(range(24)))
    drawing = experts.expert_loads(made, theme.PAGE)
    assert drawing is not None
    assert drawing.height < 1000
    assert max(len(rows) for rows in drawing.datasets.values()) <= 6 * 24 * len(BOUNDS)
    assert all(len(figure.label) < 600 for figure in figures(made)[-3:])


@pytest.mark.real
@NEEDS_BROWSER
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_sound(browser: Browser, page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    assert problems(browser, page, 9, width, scheme) == []


@pytest.mark.real
@NEEDS_BROWSER
def test_hard_names_are_sound_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    names = {f"0{UNSAFE}": UNSAFE} | {f"{'a long name ' * 7}"[:78] + f"{i:02d}": "long " * 40 for i in range(11)}
    made = with_experts(make_comparison(names), n_experts=64, layers=tuple(range(6)), dense=(f"0{UNSAFE}",))
    assert problems(browser, write_report(made, tmp_path), 9, 390, "light") == []


@pytest.mark.real
@NEEDS_BROWSER
def test_the_key_brings_one_variant_out_of_the_bars(browser: Browser, page: Path, comparison: Comparison) -> None:
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.locator(".chart svg").nth(8).wait_for(state="attached")
    faint = tab.locator("#chart-expert_loads .mark-rect path[opacity='0.04']")
    assert faint.count() == 0
    tab.locator(".legend button").nth(1).click()
    faint.nth(0).wait_for(state="attached")
    bars = expert_series.loads(comparison)
    assert faint.count() == sum(row["variant"] != "bilinear" for row in bars)
    tab.close()
