"""The figures of mixtures of experts: how evenly tokens are spread, over which experts, and what they amount to."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt

from tensorformer.lab.results import Comparison
from tensorformer.report import expert_series as series
from tensorformer.report import quantities as q
from tensorformer.report.pen import SHOWN, Drawing, Pen, number_axis, tip, token_axis
from tensorformer.report.series import Row, labels, marks
from tensorformer.report.theme import Theme

STRENGTH = dict(zip((kind.name for kind in series.CLASSES), (1.0, 0.7, 0.44, 0.25, 0.12, 0.0), strict=True))
BAR, LEAST_BAR = 15, 5  # pixels of one layer, most and least
ROOM = 420  # pixels that all layers may take before they are made lower
NAME = 26  # pixels of a variant's name above its layers


def load_evenness(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the load entropy along training.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without experts.
    """
    values = series.evenness(comparison)
    if not values:
        return None
    pen = _pen(comparison, theme, "line")
    tips = [tip("variant", "Variant"), tip("tokens", "Tokens", ",d"), tip("entropy", "Mean load entropy", ".3f")]
    tips += [tip("low", "Lowest seed", ".3f"), tip("high", "Highest seed", ".3f")]
    tips += [tip("least", "Least even layer", ".3f")]
    even = pen.rows([{"even": 1}]).mark_rule(color=pen.paint("muted"), strokeDash=[4, 4])
    lines = pen.trace(values, token_axis(), _entropy_axis, "entropy", tips)
    return pen.stack([even.encode(y=_entropy_axis("even")), *lines])


def _entropy_axis(field: str) -> alt.Y:
    return number_axis(field, "Load entropy (1 is even)")


def expert_loads(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw which share of the experts has which load at the end: a bar a layer, the fullest experts first.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without experts.
    """
    values = series.loads(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "none")
    bars, heads, height = _placed(comparison, values)
    y = alt.Y("top:Q", axis=_layer_labels(pen, bars), scale=alt.Scale(domain=[height, 0], nice=False))
    below = alt.Axis(title="Experts, the fullest first", format="%", grid=False, tickCount=5)
    x = alt.X("from:Q", axis=below, scale=alt.Scale(domain=[0, 1], nice=False))
    tips = [tip("variant", "Variant"), tip("layer", "Layer", "d"), tip("load", "Load, in even loads")]
    tips += [tip("experts", "Experts"), tip("span", "Their loads")]
    names = pen.rows(heads).encode(y=y)
    words: dict[str, Any] = {"fontSize": 12, "baseline": "bottom", "dy": -4}
    room = 260 if theme.legend else alt.ExprRef("max(60, width - 130)")
    layers = [
        names.mark_rect(filled=False, strokeWidth=1).encode(
            x=alt.value(0),
            x2=alt.value("width"),
            y2="bottom",
            stroke=alt.value(pen.paint("muted")),
            opacity=pen.shown(0.5),
        ),
        pen.rows(bars)
        .mark_rect()
        .encode(x=x, x2="to", y=y, y2="bottom", color=pen.colour(), opacity=_strength(pen), tooltip=tips),
        names.mark_text(align="left", limit=room, color=pen.paint("ink"), **words).encode(
            x=alt.value(0), text="label:N"
        ),
        names.mark_text(align="right", color=pen.paint("muted"), **words).encode(
            x=alt.value("width"), text="summary:N"
        ),
    ]
    return pen.stack(layers, height=height)


def _placed(comparison: Comparison, values: list[Row]) -> tuple[list[Row], list[Row], int]:
    """Return the bars and the variants' names with their places in pixels from the top, and the height of all."""
    n_bars = len({(row["id"], row["layer"]) for row in values})
    pitch = max(LEAST_BAR, min(BAR, ROOM // n_bars))
    bars: list[Row] = []
    heads: list[Row] = []
    at = 0
    for variant, mark in marks(comparison):
        layers = series.last(variant)
        if not layers:
            continue
        at += NAME
        summary = f"fullest {q.number(series.fullest(layers)[0], 1)}×"
        heads.append(mark | {"top": at, "bottom": at + pitch * len(layers), "summary": summary})
        for layer in layers:
            place: Row = {"top": at + 0.5, "bottom": at + pitch - 0.5}
            bars += [row | place for row in values if row["id"] == mark["id"] and row["layer"] == layer]
            at += pitch
    return bars, heads, at


def _layer_labels(pen: Pen, bars: list[Row]) -> alt.Axis:
    """Return an axis that says beside each bar which layer it is."""
    labels = {(float(row["top"]) + float(row["bottom"])) / 2: str(row["layer"]) for row in bars}
    return alt.Axis(
        title="Layer",
        titleAngle=0,
        titleAlign="right",
        titleX=-5,
        titleY=NAME - 4,
        titleBaseline="bottom",
        titleColor=pen.paint("muted"),
        titleFontSize=11,
        values=list(labels),
        labelExpr=f"{list(labels.values())}[indexof({list(labels)}, datum.value)]",
        labelOverlap="greedy",
        grid=False,
        ticks=False,
        domain=False,
    )


def _strength(pen: Pen) -> Any:
    """Encode the class of load as how strong the variant's colour is; where another is in focus all fade."""
    key = alt.Legend(
        title="Load of an expert, in even loads",
        titleColor=pen.paint("ink"),
        titleFontWeight="normal",
        titleFontSize=12,
        titleLimit=0,
        values=list(STRENGTH)[:-1],  # what has no token is blank, and a blank square tells nothing
        orient="top",
        offset=2,
        columns=3,
        symbolType="square",
        symbolFillColor=pen.paint("ink"),
        symbolStrokeColor=pen.paint("muted"),
        symbolStrokeWidth=1,
        symbolSize=130,
    )
    scale = alt.Scale(type="ordinal", domain=list(STRENGTH), range=list(STRENGTH.values()))
    strength = alt.Opacity("load:O", scale=scale, legend=key)
    return strength if pen.theme.legend else alt.condition(SHOWN, strength, alt.value(0.04))


def routed_share(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw which share of the output's norm the routed experts write at the end, by layer.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without experts.
    """
    values = series.routed_shares(comparison)
    if not values:
        return None
    pen = _pen(comparison, theme, "point")
    layers = sorted({int(row["layer"]) for row in values})
    scale = alt.Scale(domain=[layers[0] - 0.5, layers[-1] + 0.5], nice=False, zero=False)
    axis = alt.Axis(title="Layer", values=layers, format="d", grid=False, labelOverlap="greedy")
    x = alt.X("at:Q", scale=scale, axis=axis)
    tips = [tip("variant", "Variant"), tip("layer", "Layer", "d"), tip("share", "Mean routed share", ".1%")]
    tips += [tip("low", "Lowest seed", ".1%"), tip("high", "Highest seed", ".1%")]
    base = pen.rows(values).encode(x=x, color=pen.colour())
    half = pen.rows([{"half": 0.5}]).mark_rule(color=pen.paint("muted"), strokeDash=[4, 4])
    drawn = [
        half.encode(y=_share_axis("half")),
        base.mark_line(strokeWidth=1.4).encode(y=_share_axis("share"), strokeDash=pen.dash(), opacity=pen.shown(0.5)),
        base.mark_rule(strokeWidth=1.4).encode(y=_share_axis("low"), y2="high", opacity=pen.shown(0.8)),
        base.mark_point(filled=True, opacity=1, size=60).encode(
            y=_share_axis("share"), shape=pen.shape(), opacity=pen.shown(), tooltip=tips
        ),
    ]
    return pen.stack(drawn)


def _share_axis(field: str) -> alt.Y:
    return number_axis(field, "Routed share of the output", format="%")


def _pen(comparison: Comparison, theme: Theme, legend: Literal["line", "point"]) -> Pen:
    """Return a pen whose key leaves out the variants that have no experts."""
    absent = series.without(comparison)
    return Pen(comparison, theme, legend, [name for name in labels(comparison) if name not in absent])
