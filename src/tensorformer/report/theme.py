"""How a variant looks everywhere: the baseline in ink, the others in a palette safe for colour-blind readers."""

from __future__ import annotations

from dataclasses import dataclass

# Okabe and Ito's palette (jfly.uni-koeln.de/color), darkened for white paper and lightened for a dark screen.
LIGHT = {
    "page": "#ffffff",
    "ink": "#1b1d21",
    "muted": "#62666e",
    "line": "#d9dbdf",
    "zone": "#eceef1",
    "series-1": "#0069a8",
    "series-2": "#cc5500",
    "series-3": "#008a64",
    "series-4": "#b3548c",
    "series-5": "#3f9bd6",
    "series-6": "#b57f00",
}
DARK = {
    "page": "#15171b",
    "ink": "#e9eaec",
    "muted": "#9da2ab",
    "line": "#363a42",
    "zone": "#252932",
    "series-1": "#4b9be6",
    "series-2": "#ff8547",
    "series-3": "#2fc295",
    "series-4": "#e391c1",
    "series-5": "#a4d8ff",
    "series-6": "#ecb53c",
}
N_COLOURS = 6
DASHES = ((), (6, 3), (2, 2))
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")


@dataclass(frozen=True)
class Look:
    """What tells one variant from the others."""

    colour: str  # a name in LIGHT and DARK
    dash: tuple[int, ...]
    shape: str


@dataclass(frozen=True)
class Theme:
    """Where a chart goes: its colours by name, its font, and whether it carries its own legend."""

    colours: dict[str, str]
    font: str
    legend: bool


PAGE = Theme({name: f"var(--{name})" for name in LIGHT}, "system-ui, -apple-system, 'Segoe UI', sans-serif", False)
PNG = Theme(LIGHT, "Liberation Sans, Arial, Helvetica, sans-serif", True)


def looks(names: list[str], baseline: str) -> dict[str, Look]:
    """Give every variant its look: colours first, then dashes.

    Args:
        names: In the order of the table.
        baseline: The one drawn in ink.

    Returns:
        A look for each name.
    """
    found: dict[str, Look] = {}
    others = (name for name in names if name != baseline)
    for i, name in enumerate(others):
        dash = DASHES[(i // N_COLOURS) % len(DASHES)]
        found[name] = Look(f"series-{i % N_COLOURS + 1}", dash, SHAPES[(i + 1) % len(SHAPES)])
    return {name: found.get(name, Look("ink", (), SHAPES[0])) for name in names}


def css() -> str:
    """Return both palettes as CSS custom properties that follow the reader's colour scheme."""

    def block(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    return f":root{{{block(LIGHT)}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{block(DARK)}}}}}\n"
