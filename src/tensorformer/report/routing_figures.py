"""Which figures a study of routing has, in order, each with the words that say how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorformer.report import routing_charts as charts
from tensorformer.report import routing_series as series
from tensorformer.report.pen import SIGNED, Drawing
from tensorformer.report.routing_charts import YAxis
from tensorformer.report.theme import PAGE, Theme
from tensorformer.study.routing_result import GROWN, Routing

Draw = Callable[[Routing, Theme], Drawing | None]


@dataclass(frozen=True)
class Figure:
    """One chart with its title, caption and the description a screen reader gets."""

    key: str
    title: str
    caption: str
    draw: Draw

    @property
    def png(self) -> str:
        """The picture's file name."""
        return f"{self.key}.png"


def _by_keys(quantity: str, y: YAxis) -> Draw:
    return lambda result, theme: charts.by_keys(result, theme, quantity, y)


def _by_gain(kind: str) -> Draw:
    y = YAxis("Mass that the others lose for each unit gained", shows=(0.0, 1.0))
    return lambda result, theme: charts.by_gain(result, theme, kind, y)


FIGURES = (
    Figure(
        "added",
        "Competition: a key is added",
        "One key is there, against the same step without it. Under a softmax the other keys lose what it gains; in a "
        "plain product each weight is its own business.",
        _by_gain("added"),
    ),
    Figure(
        "grown",
        "Competition: a key grows",
        f"One key is {GROWN:g} times as long, where that raises its weight: the same question about a single score.",
        _by_gain("grown"),
    ),
    Figure(
        "log_odds",
        "Sharpening: the strongest key against the second",
        "All queries are made shorter or longer, behind any norm. The log-odds of a softmax grow in proportion, "
        "the odds exponentially; a product multiplies all weights of a step alike, which changes no share.",
        lambda result, theme: charts.by_scale(
            result, theme, "log_odds", YAxis("Log of the strongest weight over the second", shows=(0.0,))
        ),
    ),
    Figure(
        "top_share",
        "Sharpening: the strongest key’s share",
        "The same change of scale, and the share of a step’s mass that its strongest key holds.",
        lambda result, theme: charts.by_scale(
            result, theme, "top_share", YAxis("Share of the strongest key", style="~%", shows=(0.0,))
        ),
    ),
    Figure(
        "row_mass",
        "Mass of a row",
        "Σ|A| of a step against the number of keys it sees. A softmax has 1 at any length.",
        _by_keys("row_mass", YAxis("Σ|A| (log scale)", kind="log", style="~g")),
    ),
    Figure(
        "row_sum",
        "Sum of a row",
        "ΣA with its signs, the mean over the steps of a head. Near zero it is no denominator.",
        _by_keys("row_sum", YAxis("ΣA", expr=SIGNED, shows=(0.0,))),
    ),
    Figure(
        "negative_share",
        "Negative weight",
        "Share of a step’s mass that is in negative weights.",
        _by_keys("negative_share", YAxis("Share of Σ|A|", style="~%", shows=(0.0,))),
    ),
    Figure(
        "entropy",
        "Entropy",
        "Of the shares |A| / Σ|A| of a step’s keys, over what it would be if all were alike: 1 is even, 0 is one key.",
        _by_keys("evenness", YAxis("Entropy over log of the number of keys", shows=(1.0,))),
    ),
    Figure(
        "effective_keys",
        "Effective number of keys",
        "exp(entropy): as many keys with equal shares would be as mixed.",
        _by_keys("effective_keys", YAxis("Keys (log scale)", kind="log", style="~g", shows=(1.0,))),
    ),
    Figure(
        "distance",
        "Distance",
        "Share of the mass that one key holds, by how far back it is; "
        "steps in the second half of the training context.",
        lambda result, theme: charts.by_distance(
            result, theme, YAxis("Share of one key (log scale)", kind="log", style=".2~%")
        ),
    ),
    Figure(
        "sum_rms",
        "Growth of the sum over values",
        "Root mean square of Σ A v over a head’s values, before norm, gate and projection.",
        _by_keys("sum_rms", YAxis("rms of Σ A v (log scale)", kind="log", style="~g")),
    ),
    Figure(
        "output",
        "Growth of the output",
        "Root mean square of what a layer adds to the residual stream; median and quartiles over layers.",
        _by_keys("output", YAxis("rms of the layer’s output (log scale)", kind="log", style="~g")),
    ),
)


def figures(result: Routing) -> list[Figure]:
    """Return the figures that the study has data for, in the order of the page."""
    return [figure for figure in FIGURES if figure.draw(result, PAGE) is not None]


def spoken(figure: Figure, drawing: Drawing) -> str:
    """Return the description that a screen reader gets: the ends of every line."""
    lines: dict[str, list[series.Row]] = {}
    for rows in drawing.datasets.values():
        for row in rows:
            if "low" in row and row not in lines.setdefault(str(row["variant"]), []):
                lines[str(row["variant"])].append(row)
    ends = [f"{name} from {rows[0]['value']:.3g} to {rows[-1]['value']:.3g}" for name, rows in lines.items()]
    return f"Line chart: {figure.title}. {'; '.join(ends)}."
