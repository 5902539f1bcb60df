"""The figures of a study of routing, each a Vega-Altair chart without a width; None where there is nothing to draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import altair as alt

from tensorformer.report import routing_series as rows
from tensorformer.report.pen import Drawing, Pen, tip
from tensorformer.report.series import Row
from tensorformer.report.theme import Theme, looks
from tensorformer.study.routing_result import Routing

NUMBER = ".4~g"
LINES = 1.4  # width of a reference line


class RoutingPen(Pen):
    """The encodings of a study's series under one theme."""

    def __init__(self, series: list[rows.Series], theme: Theme) -> None:
        self.names = [s.label for s in series]
        self.looks = looks(self.names, self.names[0])
        self.datasets: dict[str, list[Row]] = {}
        self.theme = theme
        self.legend = self._legend("line") if theme.legend and len(self.names) > 1 else None


@dataclass(frozen=True)
class YAxis:
    """A value axis: its title, whether it is logarithmic, how its labels look, and what it must show."""

    title: str
    kind: Literal["linear", "log"] = "linear"
    style: str = ""
    shows: tuple[float, ...] = field(default=())
    expr: str = ""

    def on(self, name: str, values: list[Row]) -> alt.Y:
        """Return it for one field."""
        ends = [float(row[end]) for row in values for end in ("low", "high")] + list(self.shows)
        low, high = min(ends), max(ends)
        axis: dict[str, Any] = {"title": self.title, "titleAngle": 0, "titleAlign": "left", "titleX": 0, "titleY": -10}
        axis |= {"titleBaseline": "bottom", "tickCount": 5}
        axis |= {"format": self.style} if self.style else {}
        axis |= {"labelExpr": self.expr} if self.expr else {}
        # Words stand above the lines.
        if self.kind == "log":
            low, high = low / 1.15, high * 1.15 * (high / low) ** 0.06
            axis |= {"values": _log_ticks(low, high)}
            scale = alt.Scale(type="log", domain=[low, high], nice=False)
        else:
            pad = 0.04 * (high - low) or 0.1
            scale = alt.Scale(domain=[low - pad, high + 3 * pad], nice=False, zero=False)
        above = alt.Axis(**axis)
        return alt.Y(f"{name}:Q", scale=scale, axis=above)


def by_keys(result: Routing, theme: Theme, quantity: str, y: YAxis) -> Drawing | None:
    """Draw one quantity of the rows against the keys they see; ``output`` is of layers, all else of heads."""
    values = rows.outputs(result) if quantity == "output" else rows.curves(result, quantity)
    values = _drawable(values, y)
    if not values:
        return None
    pen = RoutingPen(rows.all_series(result), theme)
    most = max(float(row["keys"]) for row in values)
    x = _log_x("keys", "Keys that a row sees (log scale)", most)
    if quantity == "effective_keys":
        y = replace(y, shows=(*y.shows, most))
    layers = _traced(pen, values, x, y, [tip("seen", "Keys")])
    if quantity == "effective_keys":
        ends: list[Row] = [{"keys": at, "value": at} for at in (1.0, most)]
        layers = [_reference(pen, ends, x, y.on("value", values), "all keys alike"), *layers]
    return pen.stack([*_training(pen, result, x), *_flat(layers)])


def by_distance(result: Routing, theme: Theme, y: YAxis) -> Drawing | None:
    """Draw the share of one key against its distance."""
    values = _drawable(rows.distances(result), y)
    if not values:
        return None
    pen = RoutingPen(rows.all_series(result), theme)
    longest = max(result.runs, key=lambda run: run.context).context
    ticks = [1, *(2**i + 1 for i in range(longest.bit_length()) if 2**i + 1 <= longest)]
    axis = alt.Axis(
        title="Keys back (log scale; 0: the step itself)", values=ticks, grid=False,
        labelExpr="format(datum.value - 1, ',d')", labelOverlap="greedy",
    )  # fmt: skip
    x = alt.X("away:Q", axis=axis, scale=alt.Scale(type="log", base=2, domain=[1, longest], nice=False))
    even = [row | {"value": row["share"]} for row in rows.even_shares(result)]
    layers = _traced(pen, values, x, y, [tip("seen", "Distance")])
    return pen.stack(_flat([_reference(pen, even, x, y.on("value", values), "all keys alike"), *layers]))


def by_scale(result: Routing, theme: Theme, measure: Literal["log_odds", "top_share"], y: YAxis) -> Drawing | None:
    """Draw a measure of sharpness against the scale of the queries."""
    values = rows.scales(result, lambda head: getattr(head, measure))
    if not values:
        return None
    pen = RoutingPen(rows.all_series(result), theme)
    axis = alt.Axis(title="Queries multiplied by", values=[0, 0.5, 1, 1.5, 2, 3, 4], grid=False, format="~g")
    x = alt.X("scale:Q", axis=axis, scale=alt.Scale(domain=[0, 4], nice=False))
    return pen.stack(_flat(_traced(pen, values, x, y, [tip("scale", "Scale", "~g")], dots=True)))


def by_gain(result: Routing, theme: Theme, kind: str, y: YAxis) -> Drawing | None:
    """Draw what the other keys lost for each unit of weight that a key gained, against the weight it gained."""
    values = rows.exchanges(result, kind)
    if not values:
        return None
    pen = RoutingPen(rows.all_series(result), theme)
    title = "Weight gained, of the row’s mass before"
    axis = alt.Axis(title=title, format="~%", grid=False, tickCount=5)
    x = alt.X("gain:Q", axis=axis, scale=alt.Scale(domain=[0, 1], nice=False))
    layers = _traced(pen, values, x, y, [tip("seen", "Gained")], dots=True)
    for at, word in ((1.0, "all share a fixed sum"), (0.0, "no competition")):
        ends: list[Row] = [{"gain": 0.0, "value": at}, {"gain": 1.0, "value": at}]
        layers = [_reference(pen, ends, x, y.on("value", values), word), *layers]
    return pen.stack(_flat(layers))


def _drawable(values: list[Row], y: YAxis) -> list[Row]:
    return values if y.kind == "linear" else [row for row in values if float(row["low"]) > 0]


def _traced(pen: RoutingPen, values: list[Row], x: alt.X, y: YAxis, tips: list[Any], dots: bool = False) -> list[Any]:
    told = [tip("variant", "Run"), *tips, tip("value", "Median head", NUMBER)]
    told += [tip("low", "Lower quartile", NUMBER), tip("high", "Upper quartile", NUMBER)]
    layers = pen.trace(values, x, lambda name: y.on(name, values), "value", told)
    if dots:
        over = sorted(values, key=lambda row: row["id"] == "v0")  # as the lines are
        points = pen.rows(over).mark_point(filled=True, size=34, opacity=1)
        layers.insert(-1, points.encode(x=x, y=y.on("value", values), color=pen.colour(), opacity=pen.shown()))
    return layers


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within two ends: 1, 2 and 5 of every decade, or where they are many, 1."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    many = high / low > 300
    found = [digit * 10.0**d for d in decades for digit in ((1,) if many else (1, 2, 5))]
    return [value for value in found if low <= value <= high]


def _log_x(name: str, title: str, most: float) -> alt.X:
    ticks = [2**i for i in range(int(most).bit_length() + 1)]
    axis = alt.Axis(title=title, values=ticks, format=",d", grid=False, labelOverlap="greedy")
    return alt.X(f"{name}:Q", axis=axis, scale=alt.Scale(type="log", base=2, domain=[1, most], nice=False))


def _training(pen: RoutingPen, result: Routing, x: alt.X) -> list[Any]:
    """Return a rule at the training context, where the runs share one and the windows go beyond it."""
    contexts = rows.contexts(result)
    if len(contexts) != 1 or all(run.length == run.context for run in result.runs):
        return []
    at = pen.rows([{"keys": float(*contexts), "text": "training context"}]).encode(x=x)
    word = at.mark_text(align="right", dx=-5, baseline="top", color=pen.paint("muted"), fontSize=11)
    return [
        at.mark_rule(color=pen.paint("muted"), strokeDash=[2, 3]),
        word.encode(y=alt.value(2), text="text:N"),
    ]


def _reference(pen: RoutingPen, ends: list[Row], x: alt.X, y: alt.Y, word: str) -> list[Any]:
    """Return a dashed line, and its name above its right end."""
    line = pen.rows(ends).mark_line(color=pen.paint("muted"), strokeDash=[4, 3], strokeWidth=LINES, clip=True)
    at = pen.rows([ends[-1] | {"text": word}])
    text = at.mark_text(align="right", dx=-4, dy=-8, color=pen.paint("muted"), fontSize=11)
    return [line.encode(x=x, y=y), text.encode(x=x, y=y, text="text:N")]


def _flat(layers: list[Any]) -> list[Any]:
    return [inner for layer in layers for inner in (layer if isinstance(layer, list) else [layer])]
