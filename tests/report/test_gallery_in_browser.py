"""The gallery as a browser shows it and as a reader uses it; and pages with a fault, each of which must be caught."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page

from tensorformer.gates import GATES, SCALARS
from tensorformer.report import gallery
from tests.report.gallery_guests import invite
from tests.report.report_browser import NEEDS_BROWSER, problems

pytestmark = [pytest.mark.real, NEEDS_BROWSER]
N_CHARTS = len(SCALARS) + len(GATES) + 2


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gallery.write_gallery(tmp_path_factory.mktemp("gallery") / "gallery.html")


@pytest.fixture
def tab(browser: Browser, page: Path) -> Iterator[Page]:
    """The page, drawn, in a window of 1280 by 900."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    found = context.new_page()
    faults: list[str] = []
    found.on("pageerror", lambda error: faults.append(str(error)))
    found.goto(page.as_uri())
    found.locator(".chart svg").nth(N_CHARTS - 1).wait_for(state="attached")
    yield found
    context.close()
    assert faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_gallery_is_sound(browser: Browser, page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    assert problems(browser, page, N_CHARTS, width, scheme) == []


def test_another_packages_names_do_nothing(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = invite(monkeypatch)
    path = gallery.write_gallery(tmp_path / "gallery.html")
    assert "pwned" in path.read_text(encoding="utf-8")
    assert problems(browser, path, found + 2, 390, "light") == []


def numbers(tab: Page, root: str) -> dict[str, float]:
    """Return what a card's readout says."""
    outputs = tab.locator(f"{root} .readout output")
    said = outputs.evaluate_all("all => all.map((o) => [o.dataset.of, o.textContent])")
    return {name: float(text.removeprefix("= ").replace("−", "-").replace("·10^", "e")) for name, text in said if text}


def test_the_pointer_reads_the_value_and_the_slope(tab: Page) -> None:
    chart = tab.locator("#chart-scalar-silu")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60)
    read = numbers(tab, "#scalar-silu")
    silu = SCALARS["silu"]
    assert 1 < read["x"] < 4
    assert read["f"] == pytest.approx(float(silu.oracle(read["x"])), rel=1e-4)
    assert read["d"] == pytest.approx(float(silu.oracle(read["x"], order=1)), rel=1e-4)
    assert chart.locator(".cursor circle").count() == 2
    tab.mouse.move(2, 2)
    assert numbers(tab, "#scalar-silu") == {}


def test_the_arrow_keys_read_too(tab: Page) -> None:
    chart = tab.locator("#chart-scalar-gelu")
    chart.focus()
    for _ in range(5):
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Shift+ArrowLeft")
    read = numbers(tab, "#scalar-gelu")
    assert read["x"] == pytest.approx(0.95)
    assert read["f"] == pytest.approx(float(SCALARS["gelu"].oracle(0.95)), rel=1e-4)
    assert chart.get_attribute("aria-valuetext") == f"x 0.95, f {read['f']:.5g}, slope {read['d']:.5g}"
    tab.keyboard.press("Home")
    assert numbers(tab, "#scalar-gelu")["x"] == -6


def test_a_map_reads_the_product_and_both_slopes(tab: Page) -> None:
    tab.locator("#chart-gate-situ").focus()
    for key in ["ArrowRight"] * 3 + ["ArrowUp"] * 2:
        tab.keyboard.press(key)
    read = numbers(tab, "#gate-situ")
    assert (read["g"], read["u"]) == (1, 4)
    situ = GATES["situ"].bind(beta=4.0, linear_beta=25.0)
    gate, value = situ.gate.oracle, situ.value.oracle
    assert read["h"] == pytest.approx(float(gate(1.0) * value(4.0)), rel=1e-4)
    assert read["dg"] == pytest.approx(float(gate(1.0, order=1) * value(4.0)), rel=1e-4)
    assert read["du"] == pytest.approx(float(gate(1.0) * value(4.0, order=1)), rel=1e-4)


@pytest.mark.parametrize(("card", "mark"), [("scalar-swish", ".a"), ("gate-swiglu_oai", ".level")])
def test_sliders_and_zoom_draw_anew(tab: Page, card: str, mark: str) -> None:
    curve = tab.locator(f"#{card} .role-mark {mark}")
    drawn = [curve.get_attribute("d")]
    slider = tab.locator(f"#{card} .sliders input").first
    slider.fill("2.5")
    tab.wait_for_timeout(100)
    drawn.append(curve.get_attribute("d"))
    assert slider.locator("xpath=../output").text_content() == "2.5"
    tab.locator(f"#{card} button[data-zoom='2']").click()
    tab.wait_for_timeout(100)
    drawn.append(curve.get_attribute("d"))
    assert len(set(drawn)) == 3


def test_a_sliders_value_is_the_parameter(tab: Page) -> None:
    tab.locator("#scalar-swish .sliders input").fill("0")
    tab.locator("#chart-scalar-swish").focus()
    tab.keyboard.press("End")
    assert numbers(tab, "#scalar-swish") == {"x": 6, "f": 3, "d": 0.5}  # Swish(0) = x/2


def compared(tab: Page, first: str, second: str) -> tuple[float, float]:
    """Choose two and return the largest difference and where it is."""
    tool = tab.locator("#compare-tool")
    tool.locator("select").nth(0).select_option(first)
    tool.locator("select").nth(1).select_option(second)
    tab.wait_for_timeout(150)
    text = tool.locator(".result").text_content() or ""
    found = re.fullmatch(r"Largest difference (\S+) at [xgu] = ±?(\S+?)(?:, the edge of the window)?\.", text)
    assert found is not None, text
    size, place = (float(t.replace("−", "-").replace("·10^", "e")) for t in found.groups())
    return size, place


def test_the_comparison_finds_the_largest_difference(tab: Page) -> None:
    assert compared(tab, "scalar-gelu", "scalar-gelu_tanh") == pytest.approx((4.73e-4, 2.699), rel=1e-3)
    assert compared(tab, "scalar-gelu", "scalar-gelu_quick") == pytest.approx((2.03e-2, 2.27), rel=2e-3)
    assert compared(tab, "scalar-relu", "scalar-identity") == (6, -6)


def test_gates_are_compared_along_a_slice_with_equal_parameters(tab: Page) -> None:
    size, place = compared(tab, "gate-swiglu_clamped", "gate-swiglu_clamp_after")
    tool = tab.locator("#compare-tool")
    assert tool.locator(".given input").count() == 1  # both have the same limit
    assert size == pytest.approx(10 - 10 / (1 + 2.718281828459045**-10), rel=1e-3)
    assert place >= 10
    tool.locator("input[value=u]").check()
    tool.locator(".slice input[type=range]").fill("3")
    tool.locator(".given input").fill("2")
    tab.wait_for_timeout(150)
    # Along u at g = 3, the limit 2: φ is 2σ(2) against 2, ψ at most 2.
    assert f"{2 * (2 - 2 / (1 + 2.718281828459045**-2)):.4g}" in (tool.locator(".result").text_content() or "")


def test_a_pair_of_one_kind_is_kept(tab: Page) -> None:
    tool = tab.locator("#compare-tool")
    tool.locator("select").nth(0).select_option("gate-bilinear")
    assert tool.locator("select").nth(1).input_value().startswith("gate-")
    tool.get_by_role("button", name="silu · hard_swish").click()
    assert [s.input_value() for s in tool.locator("select").all()] == ["scalar-silu", "scalar-hard_swish"]
    tab.locator("#scalar-relu6 a[data-compare]").click()
    assert tool.locator("select").nth(0).input_value() == "scalar-relu6"


@pytest.mark.parametrize(
    ("words", "found"),
    [("apertus", ["xielu"]), ("GELU_NEW", ["gelu_tanh"]), ("deepseek-v4", ["swiglu_clamped"]), ("gpt-oss alpha", None)],
)
def test_the_search_leaves_what_fits(tab: Page, words: str, found: list[str] | None) -> None:
    tab.locator("#search").fill(words)
    names = tab.locator("article:not([hidden]) h3").all_text_contents()
    assert len(names) == tab.locator(".index li:not([hidden])").count()
    assert "swiglu_oai" in names if found is None else set(found) <= set(names)
    assert tab.locator("#count").text_content() == f"{len(names)} of {len(SCALARS) + len(GATES)}"
    tab.locator("#search").fill("no such activation")
    assert tab.locator("#count").text_content() == "nothing found"
    tab.evaluate("location.hash = '#gate-reglu'")
    tab.locator("#gate-reglu").wait_for(state="visible")


def test_maps_follow_the_colour_scheme(tab: Page) -> None:
    paint = "document.querySelector('#chart-gate-bilinear canvas').getContext('2d')"

    def corner() -> str:
        return tab.evaluate(f"[...{paint}.getImageData(3, 3, 1, 1).data].join()")

    light = corner()
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_timeout(1500)
    assert corner() != light


def test_formulas_and_facts_need_no_javascript(browser: Browser, page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert tab.locator("article math[display=block]").count() == 2 * len(SCALARS) + len(GATES)
    assert tab.locator(".noscript").is_visible()
    context.close()


POLICY = '<meta http-equiv="Content-Security-Policy"'


@pytest.mark.parametrize(
    ("old", "new", "caught"),
    [
        (POLICY, f"<script>window.pwned = 1</script>{POLICY}", "text was executed"),
        ("<main>", "<main><script>window.pwned = 1</script>", "console"),  # the page's own policy stops this one
        (POLICY, '<script src="https://example.com/plot.js"></script><meta', "request"),
        ("<main>", '<main><div style="width: 900px">wide</div>', "scrolls sideways"),
        ('id="chart-scalar-silu"', 'id="chart-scalar-silu" hidden', "no marks"),
        ("<h3", "<h4", "skips a level"),
        ("--muted:#62666e", "--muted:#d0d0d0", "contrast"),
    ],
    ids=["unescaped", "stopped", "network", "wide", "lost chart", "headings", "pale"],
)
def test_a_broken_gallery_is_caught(
    browser: Browser, page: Path, tmp_path: Path, old: str, new: str, caught: str
) -> None:
    text = page.read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "gallery.html"
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    found = problems(browser, broken, N_CHARTS, 390, "light", wait_ms=8_000)
    assert any(caught in problem for problem in found), found
