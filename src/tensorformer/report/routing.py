"""From a study of routing to its files: the page and the pictures."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from tensorformer import __version__
from tensorformer.files import write_text
from tensorformer.report import escape, theme, vega
from tensorformer.report.html import environment, policy
from tensorformer.report.pen import Drawing
from tensorformer.report.routing_figures import FIGURES, Figure, figures, spoken
from tensorformer.report.routing_series import all_series
from tensorformer.report.routing_table import tables
from tensorformer.report.words import count
from tensorformer.study.routing_result import Routing


def write_routing(result: Routing, folder: Path) -> Path:
    """Write ``routing.html`` and a PNG for each figure.

    Args:
        result: the finished study.
        folder: where the files go; made if it is not there, and pictures of an earlier study are replaced.

    Returns:
        The path of ``routing.html``.
    """
    drawn = figures(result)
    pictures = {figure.png: vega.png(vega.wide(_drawing(figure, result, theme.PNG))) for figure in drawn}
    text = _page(result, drawn)
    vega.write_pictures(folder, pictures, [figure.png for figure in FIGURES])
    write_text(folder / "routing.html", text)
    return folder / "routing.html"


def _drawing(figure: Figure, result: Routing, to: theme.Theme) -> Drawing:
    drawing = figure.draw(result, to)
    assert drawing is not None  # ``figures`` has left out those
    return drawing


def _page(result: Routing, drawn: list[Figure]) -> str:
    templates = importlib.resources.files("tensorformer.report") / "templates"
    css = theme.css() + (templates / "page.css").read_text(encoding="utf-8")
    drawings = {figure.key: _drawing(figure, result, theme.PAGE) for figure in drawn}
    scripts = [vega.bundle(), (templates / "page.js").read_text(encoding="utf-8")] if drawn else []
    found = all_series(result)
    looks = theme.looks([series.label for series in found], found[0].label)
    return (
        environment(True)
        .get_template("routing.html.jinja")
        .render(
            title=", ".join(run.name for run in result.runs),
            setting=_setting(result),
            findings=result.findings,
            figures=[(figure, spoken(figure, drawings[figure.key])) for figure in drawn],
            series=[(series, looks[series.label]) for series in found],
            tables=tables(result),
            legend=result.legend,
            version=__version__,
            css=css,
            scripts=scripts,
            charts=escape.script_json({f"chart-{key}": vega.responsive(drawing) for key, drawing in drawings.items()}),
            policy=policy(scripts),
        )
    )


def _setting(result: Routing) -> str:
    shapes = dict.fromkeys((run.windows, run.length, run.context) for run in result.runs)
    parts = [
        f"{count(windows, 'window')} of {length:,} tokens, trained on {context:,}"
        for windows, length, context in shapes
    ]
    return " · ".join([count(len(result.runs), "run"), result.text, *parts])
