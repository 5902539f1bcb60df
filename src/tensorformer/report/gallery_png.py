"""The gallery's contact sheets: every scalar with its derivative, every gate as a map, as one picture each."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch
import vl_convert

from tensorformer.files import write_bytes
from tensorformer.gates import Scalar
from tensorformer.report.gallery_entries import LEVELS, Entry, entries
from tensorformer.report.theme import PNG

COLUMNS = 11
CELL, GAP, NAME = 92, 12, 20  # pixels: a panel's width, between panels, under a panel for its name
CURVE, MARGIN, SPACE = 64, 16, 16  # pixels: a curve's height, around the sheet, between its two halves
SCALE = 2.0
FINE = round(CELL * SCALE)  # points of a map, a side


def write_sheets(folder: Path) -> list[Path]:
    """Write ``scalars.png``, ``gates.png``, and both above one another as ``gallery.png``.

    Args:
        folder: Where they go; made if it is not there.

    Returns:
        Their paths.
    """
    scalars, gates = entries()
    parts = {"scalars.png": [scalars], "gates.png": [gates], "gallery.png": [scalars, gates]}
    for name, shown in parts.items():
        write_bytes(folder / name, _squeezed(vl_convert.svg_to_png(sheet(shown), scale=SCALE)))
    return [folder / name for name in parts]


def sheet(groups: Sequence[Sequence[Entry]]) -> str:
    """Return a contact sheet as SVG, a block of panels for each group."""
    panels, top = [], MARGIN
    for group in groups:
        height = CURVE if len(group[0].halves) == 1 else CELL
        for i, entry in enumerate(group):
            row, column = divmod(i, COLUMNS)
            left, y = MARGIN + column * (CELL + GAP), top + row * (height + NAME + GAP)
            drawn = _curves(entry, height) if len(entry.halves) == 1 else _map(entry)
            panels.append(f'<svg x="{left}" y="{y}" width="{CELL}" height="{height}">{drawn}</svg>')
            panels.append(_name(entry.name, left + CELL / 2, y + height + 14))
        top += -(-len(group) // COLUMNS) * (height + NAME + GAP) + SPACE
    width, height = 2 * MARGIN + COLUMNS * (CELL + GAP) - GAP, top + MARGIN - GAP - SPACE
    paper = f'<rect width="{width}" height="{height}" fill="{PNG.colours["page"]}"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}{"".join(panels)}</svg>'


def _name(name: str, x: float, y: float) -> str:
    size = min(12.0, 1.75 * CELL / max(1, len(name)))  # a letter is about 0.55 of the size wide
    style = f'font-family="{PNG.font}" font-size="{size:.1f}" text-anchor="middle" fill="{PNG.colours["ink"]}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(name)}</text>'


def _curves(entry: Entry, height: int) -> str:
    (scalar,), (reach,) = entry.halves, entry.reach
    x = torch.linspace(-reach, reach, 2 * CELL + 1, dtype=torch.float64)
    value, slope = scalar(x), scalar.derivative(x)
    low = max(-0.7 * reach, min(0.0, value.min().item()))
    high = min(0.7 * reach, max(0.0, value.max().item()))
    pad = 0.1 * (high - low)
    scale = height / (high - low + 2 * pad)

    def place(y: float) -> float:
        return min(max(height - (y - low + pad) * scale, -height), 2 * height)

    def path(y: torch.Tensor, colour: str, style: str) -> str:
        points = " ".join(f"{i / 2:g},{place(v):.2f}" for i, v in enumerate(y.tolist()))
        return f'<polyline points="{points}" fill="none" stroke="{PNG.colours[colour]}" {style}/>'

    axes = f'<path d="M0 {place(0.0):.2f}H{CELL}M{CELL / 2} 0V{height}" stroke="{PNG.colours["line"]}"/>'
    dashed = 'stroke-width="1.1" stroke-dasharray="3 2"'
    return axes + path(slope, "series-2", dashed) + path(value, "series-1", 'stroke-width="1.9"')


def _map(entry: Entry) -> str:
    axes = [torch.linspace(-r, r, FINE, dtype=torch.float64) for r in entry.reach]
    left, right = (_numbers(s, axis) for s, axis in zip(entry.halves, axes, strict=True))
    h = right[::-1, None] * left[None, :]
    bands = np.searchsorted(np.asarray(LEVELS), np.abs(h), side="right")
    pixels = np.full((*h.shape, 3), _rgb("page"), dtype=np.uint8)
    for colour, where in (("series-1", h > 0), ("series-2", h < 0)):
        pixels[where] = _ramp(colour)[bands[where]]
    url = f"data:image/png;base64,{base64.b64encode(_encoded(pixels)).decode()}"
    edge = f'<rect x="0.5" y="0.5" width="{CELL - 1}" height="{CELL - 1}" fill="none" stroke="{PNG.colours["line"]}"/>'
    return f'<image width="{CELL}" height="{CELL}" href="{url}"/>{edge}'


def _numbers(scalar: Scalar, x: torch.Tensor) -> np.ndarray:
    return scalar(x).numpy()


def _rgb(name: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(PNG.colours[name][1:]), dtype=np.uint8)


def _ramp(name: str) -> np.ndarray:
    """Return a colour for each band, from paper to full, as the page has them."""
    share = np.minimum(1.0, (np.arange(len(LEVELS) + 1) + 0.5) / (len(LEVELS) + 0.2))
    paper, full = _rgb("page").astype(float), _rgb(name).astype(float)
    return np.rint(paper + (full - paper) * share[:, None]).astype(np.uint8)


def _encoded(pixels: np.ndarray) -> bytes:
    """Return an 8-bit RGB picture as PNG."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return _png(struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), rows)


def _squeezed(png: bytes) -> bytes:
    """Return the same picture in about a quarter of the bytes: the converter packs for speed."""
    place, head, packed = len(_SIGNATURE), b"", b""
    while place < len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        content = png[place + 8 : place + 8 + length]
        head = content if kind == b"IHDR" else head
        packed += content if kind == b"IDAT" else b""
        place += length + 12
    return _png(head, zlib.decompress(packed))


_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _png(head: bytes, rows: bytes) -> bytes:
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )
