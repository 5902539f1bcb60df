"""The figures of a probe's accuracy: how many answers are right, between a guess and all that can be known."""

from __future__ import annotations

from typing import Any

import altair as alt

from tensorformer.lab.results import Comparison
from tensorformer.report import series
from tensorformer.report.charts import by_length
from tensorformer.report.pen import Drawing, Pen, tip, token_axis
from tensorformer.report.theme import Theme

TITLE = "Right answers"


def along_training(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the share of right answers along training.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without a probe's curves.
    """
    values = series.accuracies(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "line")
    tips = [tip("variant", "Variant"), tip("tokens", "Tokens", ",d"), tip("accuracy", "Mean accuracy", ".1%")]
    tips += [tip("low", "Lowest seed", ".1%"), tip("high", "Highest seed", ".1%")]
    return pen.stack([*_levels(pen, comparison), *pen.trace(values, token_axis(), _axis, "accuracy", tips)])


def by_context(comparison: Comparison, theme: Theme) -> Drawing | None:
    """Draw the share of right answers against the context length that examples were made for.

    Args:
        comparison: What is drawn.
        theme: Where it goes.

    Returns:
        The chart, or None without a probe.
    """
    values = series.context_accuracies(comparison)
    if not values:
        return None
    pen = Pen(comparison, theme, "point")
    layers = by_length(pen, comparison, values, "accuracy", _axis, tip("text", "Accuracy ± 95 %"))
    return pen.stack([*_levels(pen, comparison), *layers])


def _axis(field: str) -> alt.Y:
    above = alt.Axis(
        title=TITLE,
        titleAngle=0,
        titleAlign="left",
        titleX=0,
        titleY=-10,
        titleBaseline="bottom",
        format="%",
        tickCount=6,
    )
    return alt.Y(f"{field}:Q", scale=alt.Scale(domain=[0, 1.08], clamp=True, nice=False), axis=above)


def _levels(pen: Pen, comparison: Comparison) -> list[Any]:
    """Return the lines of a perfect learner at the training context and of a guess."""
    probe = comparison.probe
    assert probe is not None
    rows = pen.rows([{"level": probe.perfect[comparison.context]}, {"level": probe.chance}])
    return [rows.mark_rule(color=pen.paint("muted"), strokeDash=[4, 4]).encode(y=_axis("level"))]
