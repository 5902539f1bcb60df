"""The figures, each a Vega-Altair chart without a width; None where the comparison has nothing to draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from tensorformer.lab.results import Comparison
from tensorformer.report import series
from tensorformer.report.pen import HEIGHT, SIGNED, Drawing, Pen, number_axis, tip, token_axis
from tensorformer.report.theme import Theme

ROW_HEIGHT = (46, 64)  # of one variant in the difference plot, least and most
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
LOSS = "Validation loss"
FINAL = "Final validation loss"


def loss_axis(comparison: Comparison, field: str, title: str) -> alt.Y:
    """Return the y axis of a loss, with its unit."""
    return number_axis(field, f"{title} ({series.unit(comparison)})")


def curves(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the validation loss along training.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without curves.
    """
    values = series.curves(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "line")
    tips = [tip("variant", "Variant"), tip("tokens", "Tokens", ",d"), tip("loss", "Mean loss", ".4f")]
    tips += [tip("low", "Lowest seed", ".4f"), tip("high", "Highest seed", ".4f")]
    return pen.stack(pen.trace(values, token_axis(), lambda field: loss_axis(comparison, field, LOSS), "loss", tips))


def gaps(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the paired difference to the baseline along training.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without a second curve.
    """
    values = series.gaps(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "line")
    title = f"Loss − baseline’s loss, same seed ({series.unit(comparison)})"
    tips = [tip("variant", "Variant"), tip("tokens", "Tokens", ",d"), tip("difference", "Mean difference", "+.4f")]
    tips += [tip("low", "Lowest seed", "+.4f"), tip("high", "Highest seed", "+.4f")]
    layers = pen.trace(
        values, token_axis(), lambda field: number_axis(field, title, labelExpr=SIGNED), "difference", tips
    )
    zone = pen.rows([{"from": -comparison.delta, "to": comparison.delta, "zero": 0}])
    area = zone.mark_rect(color=pen.paint("zone"), opacity=1).encode(y="from:Q", y2="to")
    zero = zone.mark_rule(color=pen.paint("ink"), strokeWidth=1.2).encode(y="zero:Q")
    return pen.stack([area, zero, *layers])


def differences(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the difference of the final loss to the baseline: seeds, mean and interval, one row a variant.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None where the baseline is alone.
    """
    values, seeds = series.differences(comparison), series.seed_differences(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "none")
    edges = [-comparison.delta, comparison.delta, *(float(row["difference"]) for row in seeds)]
    edges += [float(row[k]) for row in values for k in ("difference", "low", "high") if k in row]
    pad = 0.04 * (max(edges) - min(edges))
    scale = alt.Scale(domain=[min(edges) - pad, max(edges) + pad], nice=False, zero=False)
    axis = alt.Axis(
        title=f"Loss − baseline’s loss ({series.unit(comparison)}; left is better)",
        labelExpr=SIGNED,
        grid=False,
        tickCount=6,
    )
    order = [str(row["id"]) for row in values]
    y = alt.Y("id:N", axis=None, scale=alt.Scale(domain=order, padding=0))
    x = alt.X("difference:Q", scale=scale, axis=axis)
    ends = [alt.X(f"{end}:Q", scale=scale, axis=axis) for end in ("low", "high")]

    drop = 9  # pixels below the middle of the row; the words are above
    base = pen.rows(values).encode(y=y, opacity=pen.shown())
    spans = pen.rows([row for row in values if "low" in row]).encode(y=y, opacity=pen.shown(), color=pen.colour())
    dots = pen.rows(seeds).encode(y=y, x=x, opacity=pen.shown(0.8), color=pen.colour())
    zones = pen.rows([{"id": key, "zero": 0, "from": -comparison.delta, "to": comparison.delta} for key in order])
    zones = zones.encode(y=y)
    seed_tips = [tip("variant", "Variant"), tip("seed", "Seed"), tip("difference", "Difference", "+.4f")]
    tips = [tip("variant", "Variant"), tip("text", "Difference"), tip("interval", "95 % interval")]
    words: dict[str, Any] = {"fontSize": 12, "yOffset": drop - 21, "baseline": "middle"}
    room = 260 if theme.legend else alt.ExprRef("max(60, width - 150)")
    start, zero = alt.X("from:Q", scale=scale, axis=axis), alt.X("zero:Q", scale=scale, axis=axis)
    layers = [
        zones.mark_bar(color=pen.paint("zone"), opacity=1, size=26, yOffset=drop).encode(x=start, x2="to"),
        zones.mark_tick(color=pen.paint("ink"), opacity=1, thickness=1.2, size=26, yOffset=drop).encode(x=zero),
        spans.mark_rule(strokeWidth=2, yOffset=drop).encode(x=ends[0], x2="high"),
        *(spans.mark_tick(thickness=2, size=9, yOffset=drop).encode(x=end) for end in ends),
        dots.mark_point(filled=False, size=22, strokeWidth=1.1, yOffset=drop).encode(tooltip=seed_tips),
        base.mark_point(filled=True, opacity=1, size=90, yOffset=drop).encode(
            x=x, color=pen.colour(), shape=pen.shape(), tooltip=[*tips, tip("verdict", "Verdict")]
        ),
        base.mark_text(align="left", limit=room, color=pen.paint("ink"), **words).encode(
            x=alt.value(0), text="label:N"
        ),
        base.mark_text(align="right", color=pen.paint("muted"), **words).encode(x=alt.value("width"), text="summary:N"),
    ]
    return pen.stack(layers, height=min(max(ROW_HEIGHT[0] * len(order), HEIGHT), ROW_HEIGHT[1] * len(order)))


def contexts(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the final loss against the context length it was evaluated at.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None where no context was evaluated.
    """
    values = series.contexts(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "point")
    word = tip("text", "Loss ± 95 %")
    return pen.stack(
        by_length(pen, comparison, values, "loss", lambda field: loss_axis(comparison, field, FINAL), word)
    )


def by_length(
    pen: Pen, comparison: Comparison, values: list[series.Row], mean: str, y: Callable[[str], alt.Y], word: Any
) -> list[Any]:
    """Return the layers of means with their intervals against the context length at evaluation.

    Args:
        pen: To draw with.
        comparison: What is drawn.
        values: Rows with ``context``, ``at``, the mean, and ``low`` and ``high`` where there is an interval.
        mean: The field that holds the mean.
        y: The axis of a field.
        word: The tooltip's line that says the mean.
    """
    lengths = sorted({int(row["context"]) for row in values})
    scale = alt.Scale(type="log", base=2, domain=[lengths[0] / 1.25, lengths[-1] * 1.25], nice=False)
    axis = alt.Axis(title="Context at evaluation (tokens, log scale)", values=lengths, format=",d", grid=False)
    x = alt.X("at:Q", scale=scale, axis=axis)
    tips = [tip("variant", "Variant"), tip("context", "Context", ",d"), word]
    base = pen.rows(values).encode(x=x, opacity=pen.shown())
    spans = pen.rows([row for row in values if "low" in row]).encode(x=x, color=pen.colour(), opacity=pen.shown(0.8))
    layers = [
        base.mark_line(strokeWidth=1.4).encode(y=y(mean), color=pen.colour(), strokeDash=pen.dash()),
        spans.mark_rule(strokeWidth=1.4).encode(y=y("low"), y2="high"),
        base.mark_point(filled=True, opacity=1, size=60).encode(
            y=y(mean), color=pen.colour(), shape=pen.shape(), tooltip=tips
        ),
    ]
    if comparison.context in lengths and len(lengths) > 1:
        at = pen.rows([{"at": comparison.context, "text": "training context"}]).encode(x=x)
        rule = at.mark_rule(color=pen.paint("muted"), strokeDash=[2, 3])
        said = at.mark_text(align="left", dx=5, baseline="top", color=pen.paint("muted"), fontSize=11)
        layers = [rule, *layers, said.encode(y=alt.value(2), text="text:N")]
    return layers


def wall_clock(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the validation loss against training time, at each variant's own measured speed.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without curves.
    """
    values = series.curves(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "line")
    longest = max(float(row["seconds"]) for row in values)
    unit = max((u for u, s in SECONDS.items() if longest >= 2 * s), key=SECONDS.__getitem__, default="s")
    values = [row | {"time": float(row["seconds"]) / SECONDS[unit]} for row in values]
    axis = alt.Axis(title=f"Training time ({unit})", grid=False, tickCount=6)
    x = alt.X("time:Q", axis=axis, scale=alt.Scale(nice=False, zero=False))
    tips = [tip("variant", "Variant"), tip("time", f"Time ({unit})", ".2f"), tip("loss", "Mean loss", ".4f")]
    tips += [tip("tokens", "Tokens", ",d"), tip("measured", "Clock of the runs (s)", ",.0f")]
    return pen.stack(pen.trace(values, x, lambda field: loss_axis(comparison, field, LOSS), "loss", tips))


def data_to_match(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the baseline's loss by training length, and the length that each variant's loss is worth.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None where the baseline was not trained at other lengths.
    """
    lengths, found = series.baseline_lengths(comparison), series.matches(comparison)
    if not lengths:
        return None
    pen = Pen(comparison, theme, "point")
    at = [float(row[k]) for row in [*lengths, *found] for k in ("tokens", "equal") if k in row]
    scale = alt.Scale(type="log", base=2, domain=[min(at) / 1.1, max(at) * 1.1], nice=False)
    ticks = [int(row["tokens"]) for row in lengths]
    x = alt.X(
        "tokens:Q",
        scale=scale,
        axis=alt.Axis(title="Training tokens (log scale)", values=ticks, format=".3~s", grid=False),
    )
    tips = [tip("variant", "Variant"), tip("tokens", "Tokens", ",d"), tip("text", "Loss ± 95 %")]
    worth = [tip("variant", "Variant"), tip("text", "Loss ± 95 %"), tip("ratio", "Data to match")]
    base = pen.rows(lengths).encode(x=x, color=pen.colour())
    spans = pen.rows([row for row in lengths if "low" in row]).encode(x=x, color=pen.colour())
    equal, here = pen.rows([row for row in found if "equal" in row]), pen.rows(found)
    y = loss_axis(comparison, "loss", FINAL)
    layers = [
        spans.mark_rule(strokeWidth=1.4).encode(y=loss_axis(comparison, "low", FINAL), y2="high"),
        base.mark_line(strokeWidth=1.8).encode(y=y),
        equal.mark_rule(strokeWidth=1.2, strokeDash=[3, 2]).encode(
            x=x, x2="equal", y=y, color=pen.colour(), opacity=pen.shown()
        ),
        base.mark_point(filled=True, opacity=1, size=60).encode(y=y, tooltip=tips),
        here.mark_point(filled=True, opacity=1, size=75).encode(
            x=x,
            y=y,
            color=pen.colour(),
            shape=pen.shape(),
            opacity=pen.shown(),
            tooltip=[*worth, tip("interval", "95 % interval")],
        ),
    ]
    return pen.stack(layers)
