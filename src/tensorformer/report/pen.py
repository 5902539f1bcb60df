"""What the charts of one comparison share: colours, dashes, shapes, axes, bands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt

from tensorformer.lab.results import Comparison
from tensorformer.report import series
from tensorformer.report.theme import Theme, looks

HEIGHT = 300
SHOWN = "focus == '' || datum.id == focus"  # the page's key sets focus to a variant's id


@dataclass(frozen=True)
class Drawing:
    """A chart without a width, and the rows that it names: Altair would copy rows at every step."""

    chart: alt.LayerChart
    datasets: dict[str, list[series.Row]]
    height: int


class Pen:
    """The encodings of one comparison under one theme; its key names the variants ``drawn``, all by default."""

    def __init__(
        self,
        comparison: Comparison,
        theme: Theme,
        legend: Literal["line", "point", "none"],
        drawn: list[str] | None = None,
    ) -> None:
        names = [variant.name for variant in series.ordered(comparison)]
        self.names = list(series.labels(comparison).values())
        self.looks = dict(zip(self.names, looks(names, comparison.baseline).values(), strict=True))
        self.datasets: dict[str, list[series.Row]] = {}
        self.theme = theme
        self.legend = self._legend(legend) if theme.legend and legend != "none" and len(self.names) > 1 else None
        if self.legend is not None and drawn is not None:
            label = series.labels(comparison)
            self.legend.values = [label[name] for name in drawn]

    def paint(self, name: str) -> str:
        """Return a named colour of the theme."""
        return self.theme.colours[name]

    def _legend(self, of: str) -> alt.Legend:
        longest = max(map(len, self.names))
        columns = max(1, min(4, 600 // (40 + 6 * longest)))  # of a picture 600 wide, letters of about 6
        look: dict[str, Any] = {"title": None, "orient": "bottom", "columns": columns, "labelLimit": 260}
        if of == "line":
            look |= {"symbolType": "stroke", "symbolSize": 300}
        return alt.Legend(symbolOpacity=1, **look)

    def colour(self) -> alt.Color:
        """Encode the variant as its colour."""
        paints = [self.paint(self.looks[name].colour) for name in self.names]
        return alt.Color("label:N", scale=alt.Scale(domain=self.names, range=paints), legend=self.legend)

    def dash(self) -> alt.StrokeDash:
        """Encode the variant as its dash."""
        dashes = [list(self.looks[name].dash) or [1, 0] for name in self.names]
        return alt.StrokeDash("label:N", scale=alt.Scale(domain=self.names, range=dashes), legend=self.legend)

    def shape(self) -> alt.Shape:
        """Encode the variant as its point shape."""
        shapes = [self.looks[name].shape for name in self.names]
        return alt.Shape("label:N", scale=alt.Scale(domain=self.names, range=shapes), legend=self.legend)

    def shown(self, full: float = 1.0, faded: float = 0.1) -> Any:
        """Encode whether the variant is in focus as opacity; a picture has no focus."""
        if self.theme.legend:
            return alt.value(full)
        return alt.condition(SHOWN, alt.value(full), alt.value(full * faded))

    def stack(self, layers: list[Any], height: int = HEIGHT) -> Drawing:
        """Lay the layers that have rows over one another, the first at the bottom."""
        full = {name: kept for name, kept in self.datasets.items() if kept}
        layers = [layer for layer in layers if layer.data.name in full]
        return Drawing(alt.LayerChart(layer=layers, height=height), full, height)

    def rows(self, values: list[series.Row]) -> alt.Chart:
        """Start a layer on plain rows, numbers to seven digits."""
        kept = [{k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()} for row in values]
        text = json.dumps(kept, allow_nan=False)
        name = f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.datasets[name] = kept
        return alt.Chart(alt.NamedData(name=name))

    def trace(self, values: list[series.Row], x: alt.X, y: Callable[[str], alt.Y], mean: str, tips: list[Any]) -> Any:
        """Return the layers of curves with bands: band, mean, and unseen points that answer the pointer."""
        values = sorted(values, key=lambda row: row["id"] == "v0")  # the baseline on top
        base = self.rows(values).encode(x=x, color=self.colour())
        band = base.mark_area().encode(y=y("low"), y2="high", opacity=self.shown(0.15, 0.15))
        line = (
            self.rows(values)
            .mark_line(strokeWidth=1.8)
            .encode(x=x, y=y(mean), color=self.colour(), strokeDash=self.dash(), opacity=self.shown())
        )
        hover = base.mark_point(filled=True, size=140).encode(y=y(mean), opacity=alt.value(0), tooltip=tips)
        return [band, line, hover]


SIGNED = "datum.value == 0 ? '0' : format(datum.value, '+~r')"  # labels of a difference


def number_axis(field: str, title: str, **axis: Any) -> alt.Y:
    """Return a y axis that does not begin at zero, its title above it in one line."""
    above = alt.Axis(
        title=title, titleAngle=0, titleAlign="left", titleX=0, titleY=-10, titleBaseline="bottom", tickCount=6, **axis
    )
    return alt.Y(f"{field}:Q", scale=alt.Scale(zero=False, nice=True), axis=above)


def token_axis() -> alt.X:
    """Return the x axis of training tokens."""
    axis = alt.Axis(title="Training tokens", format="~s", grid=False, tickCount=6)
    return alt.X("tokens:Q", axis=axis, scale=alt.Scale(nice=False, zero=False))


def tip(field: str, title: str, style: str = "") -> alt.Tooltip:
    """Return one line of a tooltip: a number in ``style``, or a text."""
    return alt.Tooltip(f"{field}:Q", title=title, format=style) if style else alt.Tooltip(f"{field}:N", title=title)


def configure(chart: Any, theme: Theme) -> Any:
    """Give a finished chart its fonts and its paper."""
    ink, muted, line = theme.colours["ink"], theme.colours["muted"], theme.colours["line"]
    axis: dict[str, Any] = {"labelColor": muted, "titleColor": ink, "tickColor": line, "domainColor": line}
    axis |= {"gridColor": line, "gridOpacity": 0.6, "titleFontWeight": "normal", "titleFontSize": 12}
    axis |= {"labelFontSize": 11, "titlePadding": 8, "labelPadding": 5, "tickSize": 4}
    paper = theme.colours["page"] if theme.legend else "transparent"
    chart = chart.configure(font=theme.font, background=paper, aria=False).configure_axis(**axis)
    chart = chart.configure_view(stroke=None)
    return chart.configure_legend(labelColor=ink, labelFontSize=12, symbolStrokeWidth=2.5)
