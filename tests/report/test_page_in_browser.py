"""The page as a browser shows it; and pages with a fault, each of which must be caught."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from tensorformer.report import write_report
from tests.report.report_browser import NEEDS_BROWSER, problems
from tests.report.report_factory import UNSAFE, make_comparison

pytestmark = [pytest.mark.real, NEEDS_BROWSER]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_comparison(), tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_report_is_sound(browser: Browser, page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    assert problems(browser, page, 6, width, scheme) == []


@pytest.mark.parametrize(
    ("names", "seeds", "charts"),
    [
        ({f"{i}{UNSAFE}": UNSAFE for i in range(3)}, 2, 6),
        ({f"{'a name of eighty characters ' * 3}"[:78] + f"{i:02d}": "long " * 40 for i in range(12)}, 3, 6),
        ({"a": "", "b" * 80: ""}, 1, 6),
        ({"alone": "one variant"}, 3, 4),
    ],
    ids=["unsafe", "twelve", "one seed", "alone"],
)
def test_hard_reports_are_sound_on_a_phone(
    browser: Browser, tmp_path: Path, names: dict[str, str], seeds: int, charts: int
) -> None:
    assert problems(browser, write_report(make_comparison(names, seeds), tmp_path), charts, 390, "light") == []


def test_the_key_brings_one_variant_out(browser: Browser, page: Path) -> None:
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.locator(".chart svg").nth(5).wait_for(state="attached")
    faint = tab.locator("#chart-curves .mark-line path[opacity='0.1']")
    assert faint.count() == 0
    button = tab.locator(".legend button").nth(1)
    button.click()
    faint.nth(3).wait_for(state="attached")
    assert faint.count() == 4
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    faint.nth(0).wait_for(state="detached")
    assert button.get_attribute("aria-pressed") == "false"
    tab.close()


def test_text_and_tables_need_no_javascript(browser: Browser, page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert tab.locator("table.results tbody tr").count() == 5
    hrefs = tab.locator(".noscript a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert len(hrefs) == 6
    assert all((page.parent / href).is_file() for href in hrefs)
    context.close()


POLICY = '<meta http-equiv="Content-Security-Policy"'


@pytest.mark.parametrize(
    ("old", "new", "caught"),
    [
        (POLICY, "<script>window.pwned = 1</script><meta", "text was executed"),
        (POLICY, f"<script>window.pwned = 1</script>{POLICY}", "text was executed"),
        ("<main>", "<main><script>window.pwned = 1</script>", "console"),  # the page's own policy stops this one
        (POLICY, '<script src="https://example.com/vega.js"></script><meta', "request"),
        ("<main>", '<main><div style="width: 900px">wide</div>', "scrolls sideways"),
        ('"chart-gap":', '"chart-lost":', "charts drawn"),
        ("<h2", "<h4", "skips a level"),
        ("--ink:#1b1d21", "--ink:#e0e0e0", "contrast"),
    ],
    ids=["unescaped", "before the policy", "stopped", "network", "wide", "lost chart", "headings", "pale"],
)
def test_a_broken_page_is_caught(browser: Browser, page: Path, tmp_path: Path, old: str, new: str, caught: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "report.html"
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    found = problems(browser, broken, 6, 390, "light", wait_ms=6_000)
    assert any(caught in problem for problem in found), found
