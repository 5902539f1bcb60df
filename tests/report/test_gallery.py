"""The gallery's text and pictures: complete, the same every time, self-contained, harmless."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from html import unescape
from pathlib import Path

import pytest

from tensorformer.errors import StorageError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.report import gallery, gallery_entries, gallery_png
from tensorformer.report.gallery_sliders import sliders
from tests.report.gallery_guests import EVIL, invite


@pytest.fixture(scope="module")
def page() -> str:
    return gallery.page()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of a catalogue to which another package has added its entries."""
    invite(monkeypatch)
    return gallery.page()


def test_every_catalogue_name_has_its_place(page: str) -> None:
    for kind, names in (("scalar", SCALARS), ("gate", GATES)):
        for name in names:
            assert page.count(f'<article class="entry" id="{kind}-{name}"') == 1
            assert page.count(f'data-key="{kind}-{name}"') == 1
            assert page.count(f'<option value="{kind}-{name}"') == 2
    data = json.loads(re.search(r'id="entries">(.*?)</script>', page, re.S)[1])  # pyright: ignore[reportOptionalSubscript]
    assert [e["name"] for e in data["entries"]] == [*SCALARS, *GATES]


def test_every_entry_has_its_facts(page: str) -> None:
    cards = re.findall(r'<article class="entry" id="([^"]+)".*?</article>', page, re.S)
    bodies = dict(zip(cards, re.findall(r"<article.*?</article>", page, re.S), strict=True))
    for name, entry in [*SCALARS.items(), *GATES.items()]:
        text = bodies[f"{type(entry).__name__.lower()}-{name}"]
        labels = {"Range", "Bound", "Smoothness", "Degree", "Cost", "Source"}
        labels |= {"φ, ψ"} if isinstance(entry, Gate) else {"Limits"}
        labels |= {label for label, given in (("Models", entry.models), ("Aliases", entry.aliases)) if given}
        assert labels <= set(re.findall(r"<dt>(.*?)</dt>", text)), name
        for word in (entry.source, *entry.models, *entry.aliases):
            assert word in unescape(text)
        assert text.count('<math display="block">') == (2 if isinstance(entry, Scalar) else 1)
        assert text.count('type="range"') == len(entry.needs)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("silu", {"Range": "−0.27846 … ∞", "Bound": "below only", "Cost": "exp, div, mul, add"}),
        ("relu", {"Smoothness": "0", "Cost": "max", "Degree": "not a polynomial"}),
        ("cube", {"Degree": "3", "Smoothness": "∞", "Range": "−∞ … ∞"}),
        ("situ", {"Range": "−100 … 100", "Bound": "|h| ≤ 100"}),
        ("swiglu_oai", {"Range": "−42 … 56", "Aliases": "swigluoai"}),
        ("bilinear", {"Degree": "2", "Cost": "mul"}),
    ],
)
def test_facts_that_are_known(name: str, facts: dict[str, str]) -> None:
    (entry,) = (e for group in gallery_entries.entries() for e in group if e.name == name)
    found = {label: re.sub("<.*?>", "", str(fact)).removeprefix("C") for label, fact in entry.facts}
    assert {label: found[label] for label in facts} == facts


def test_sliders_begin_inside_their_ranges_and_are_accepted() -> None:
    for entry in (*SCALARS.values(), *GATES.values()):
        for s in sliders(entry):
            assert s.low <= s.value <= s.high
        entry.bind(**{s.name: s.value for s in sliders(entry)})
        entry.bind(**{s.name: s.low for s in sliders(entry)})
        entry.bind(**{s.name: s.high for s in sliders(entry)})


def test_the_page_is_small_and_asks_for_nothing(page: str) -> None:
    assert len(page.encode()) < 600_000
    assert re.findall(r'(?:src|href|action)="([^#"][^"]*)"', page) == []
    assert not re.search(r"@import|url\((?!#)", page.replace("url(#cut-${unique})", ""))
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_the_same_catalogue_gives_the_same_bytes(page: str) -> None:
    code = (
        "import sys; from tensorformer.report import gallery, gallery_entries, gallery_png;"
        "sys.stdout.buffer.write((gallery.page() + gallery_png.sheet(list(gallery_entries.entries()))).encode())"
    )
    texts = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        texts.append(
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment).stdout
        )
    assert texts[0] == texts[1]
    assert texts[0].startswith(page.encode())


def test_text_of_another_package_stays_text(hostile: str) -> None:
    assert EVIL not in hostile
    assert "<img" not in hostile
    assert hostile.count("<script") == 2
    assert hostile.count("</script") == 2
    assert hostile.count("</style") == 1
    ids = re.findall(r'id="([^"]+)"', hostile)
    assert len(ids) == len(set(ids))
    assert {"gate--", "gate---2"} <= set(re.findall(r'id="(gate-[-0-9]+)"', hostile))


def test_a_number_that_is_bound_is_where_the_slider_begins(hostile: str) -> None:
    card = re.search(r'<article class="entry" id="gate--script-".*?</article>', hostile, re.S)
    assert card is not None
    assert 'data-name="c" aria-label="c" min="1" max="60" step="0.5" value="3.0"' in card[0]


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        gallery.write_gallery(tmp_path / "file" / "gallery.html")


def test_the_sheets_are_whole_pictures_of_everything(tmp_path: Path) -> None:
    paths = gallery_png.write_sheets(tmp_path / "new")
    assert [p.name for p in paths] == ["scalars.png", "gates.png", "gallery.png"]
    heights = []
    for path in paths:
        data = path.read_bytes()
        assert len(data) < 400_000
        width, height, depth, kind = struct.unpack_from(">IIBB", data, 16)
        assert (depth, kind, width) == (8, 6, 2328)
        length = struct.unpack_from(">I", data, 33)[0]
        assert len(zlib.decompress(data[41 : 41 + length])) == height * (4 * width + 1)
        heights.append(height)
    assert max(heights[:2]) < heights[2] < sum(heights)
    svg = gallery_png.sheet(list(gallery_entries.entries()))
    assert svg.count("<polyline") == 2 * len(SCALARS)
    assert svg.count("<image") == len(GATES)
    assert all(f">{name}</text>" in svg for name in (*SCALARS, *GATES))
