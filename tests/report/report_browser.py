"""Opens a page as a reader does, and says everything that is wrong with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import TimeoutError as Late

CHROMIUM = shutil.which("chromium")
NEEDS_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
WAIT_MS = 30_000

# What can be seen only after drawing: for each chart its marks, its width and the contrast of its text.
INSPECT = """() => {
  const found = [];
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  for (const chart of document.querySelectorAll(".chart")) {
    const marks = [...chart.querySelectorAll("g[class*='role-mark'] path, g[class*='role-mark'] line")]
      .filter((mark) => { const box = mark.getBoundingClientRect(); return box.width + box.height > 2; });
    if (marks.length === 0) found.push(`${chart.id}: no marks`);
    if (!chart.getAttribute("aria-label")) found.push(`${chart.id}: no description`);
    for (const svg of chart.querySelectorAll("svg"))
      if (svg.getBoundingClientRect().width > chart.clientWidth + 1) found.push(`${chart.id}: wider than its box`);
    for (const text of chart.querySelectorAll("svg text")) {
      const ink = light(getComputedStyle(text).fill);
      const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      if (contrast < 4.5) { found.push(`${chart.id}: contrast ${contrast.toFixed(1)}`); break; }
    }
  }
  if (window.pwned !== undefined) found.push("text was executed");
  const page = document.scrollingElement;
  if (page.scrollWidth > innerWidth) found.push(`scrolls sideways: ${page.scrollWidth} > ${innerWidth}`);
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) found.push(`heading ${heading.textContent} skips a level`);
    level = own;
  }
  if (!document.documentElement.lang) found.push("no language");
  if (!document.title) found.push("no title");
  return found;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium for as long as the block runs."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def problems(
    browser: Browser, page: Path, n_charts: int, width: int, scheme: Literal["light", "dark"], wait_ms: int = WAIT_MS
) -> list[str]:
    """Open ``page`` offline and return everything that is wrong with it.

    Args:
        browser: A running browser.
        page: The file.
        n_charts: How many charts must be drawn.
        width: Of the window, in pixels.
        scheme: What the reader prefers.
        wait_ms: How long drawing may take.

    Returns:
        One text a problem; empty for a good page.
    """
    found: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    tab = context.new_page()

    def heard(message: Any) -> None:
        if message.type in ("warning", "error"):
            found.append(f"console: {message.text}")

    def asked(request: Any) -> None:
        if request.url != page.as_uri() and not request.url.startswith("data:"):
            found.append(f"request: {request.url}")

    tab.on("console", heard)
    tab.on("pageerror", lambda error: found.append(f"error: {error}"))
    tab.on("request", asked)
    tab.goto(page.as_uri(), wait_until="domcontentloaded")
    try:
        tab.locator(".chart svg").nth(n_charts - 1).wait_for(state="attached", timeout=wait_ms)
    except Late:
        found.append(f"{tab.locator('.chart svg').count()} of {n_charts} charts drawn")
    tab.wait_for_timeout(200)
    found += tab.evaluate(INSPECT)
    context.close()
    return found
