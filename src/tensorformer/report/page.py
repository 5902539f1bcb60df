"""From a comparison to its files: the page, the Markdown and the pictures."""

from __future__ import annotations

import datetime
import functools
import importlib.resources
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from tensorformer.files import write_bytes, write_text
from tensorformer.lab.results import Comparison, Variant
from tensorformer.report import escape, series, table, theme, words
from tensorformer.report import quantities as q
from tensorformer.report.figures import Figure, figures
from tensorformer.report.html import environment, policy
from tensorformer.report.pen import HEIGHT, configure

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
PNG_WIDTH = 600
PNG_SCALE = 2.0
OUTLINES = {  # of the point shapes, for the page's key
    "square": "M9.5 2.5h7v7h-7z",
    "triangle-up": "M13 1.5 17.6 9.8H8.4z",
    "triangle-down": "M13 10.5 17.6 2.2H8.4z",
    "diamond": "M13 1 17.2 6 13 11 8.8 6z",
    "cross": "M11.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
}


@dataclass(frozen=True)
class Detail:
    """Everything about one variant that the main table has no room for."""

    variant: Variant
    facts: list[tuple[str, str]]
    heads: list[table.Column]
    rows: list[list[str]]
    fence: str


def write_report(comparison: Comparison, folder: Path) -> Path:
    """Write ``report.html``, ``report.md`` and their pictures.

    Args:
        comparison: The finished comparison.
        folder: Where the files go; made if it is not there, and pictures of an earlier report are replaced.

    Returns:
        The path of ``report.html``.
    """
    drawn = figures(comparison)
    pictures = {figure.png: _png(_wide(figure, comparison)) for figure in drawn}
    summary = _summary(drawn, comparison)
    if summary is not None:
        pictures["summary.png"] = _png(summary)
    context = _context(comparison, drawn)
    markdown, page = _markdown(context), _page(context)
    for name in {*KEYS, *pictures}:
        if name in pictures:
            write_bytes(folder / name, pictures[name])
        else:
            (folder / name).unlink(missing_ok=True)
    write_text(folder / "report.md", markdown)
    write_text(folder / "report.html", page)
    return folder / "report.html"


KEYS = [f"{key}.png" for key in ("difference", "curves", "gap", "context", "wall_clock", "data_to_match", "summary")]


def _wide(figure: Figure, comparison: Comparison) -> dict[str, Any]:
    drawing = figure.draw(comparison, theme.PNG)
    return _finish(drawing.chart.properties(width=PNG_WIDTH), theme.PNG, drawing.datasets)


def _summary(drawn: list[Figure], comparison: Comparison) -> dict[str, Any] | None:
    panels = [figure for figure in drawn if figure.key in ("difference", "curves")]
    charts, datasets = [], {}
    for figure in panels:
        drawing = figure.draw(comparison, theme.PNG)
        above = 36 if figure.key == "difference" else 14  # the curves' axis has its own title above it
        title = alt.Title(figure.title, anchor="start", fontSize=14, offset=above)
        height = max(HEIGHT, drawing.height)
        charts.append(drawing.chart.properties(width=430, height=height, title=title))
        datasets |= drawing.datasets
    if not charts:
        return None
    both = alt.hconcat(*charts, spacing=40)
    both = both.resolve_scale(color="independent", shape="independent", strokeDash="independent")
    return _finish(both, theme.PNG, datasets)


def _spec(figure: Figure, comparison: Comparison) -> dict[str, Any]:
    drawing = figure.draw(comparison, theme.PAGE)
    chart = drawing.chart.add_params(alt.param(name="focus", value=""))
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    spec = _finish(chart.properties(width="container", autosize=fit), theme.PAGE, drawing.datasets)
    del spec["$schema"]  # an address nobody needs to ask for
    return spec


def _finish(chart: Any, to: theme.Theme, datasets: dict[str, list[series.Row]]) -> dict[str, Any]:
    return configure(chart, to).to_dict() | {"datasets": datasets}


def _png(spec: dict[str, Any]) -> bytes:
    return vl_convert.vegalite_to_png(spec | {"padding": 14}, vl_version=VEGA_LITE, scale=PNG_SCALE)


@functools.cache
def _bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script without imports."""
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("the Vega bundle would end its own script element")
    return text


def _context(comparison: Comparison, drawn: list[Figure]) -> dict[str, Any]:
    rates, grid = table.rate_lines(comparison)
    lines = table.lines(comparison)
    command = f"tensorformer compare {shlex.quote(comparison.recipe_path or f'{comparison.name}.toml')}"
    variants = series.ordered(comparison)
    return {
        "comparison": comparison,
        "answer": words.answer(comparison),
        "setting": _setting(comparison),
        "columns": table.columns(comparison),
        "lines": lines,
        "table_caption": _caption(comparison),
        "notes": words.notes(comparison),
        "figures": drawn,
        "labels": series.labels(comparison),
        "looks": theme.looks([v.name for v in variants], comparison.baseline),
        "outlines": OUTLINES,
        "rates": rates,
        "grid": grid,
        "details": [_detail(comparison, variant) for variant in variants],
        "facts": table.facts(comparison),
        "command": command,
        "command_fence": escape.fence(command),
    }


def _setting(comparison: Comparison) -> str:
    n = len(comparison.variants)
    parts = [words.count(n, "variant"), words.count(len(comparison.seeds), "seed")]
    parts += [f"{q.scaled(comparison.tokens, '', 0.1)} tokens a run", f"context {comparison.context:,}"]
    return " · ".join([*parts, comparison.corpus.source, _when(comparison.created)])


def _when(created: str) -> str:
    """Return an ISO time to the minute, or the text itself where it is not one."""
    try:
        return datetime.datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return created


def _caption(comparison: Comparison) -> str:
    spread = "± and … are 95 % intervals over seeds" if len(comparison.seeds) > 1 else "one seed, so no intervals"
    under = {"params": "parameters", "flops": "compute", "none": ""}[comparison.match]
    apart = f"; under {under}, the distance from the baseline" if under and len(comparison.variants) > 1 else ""
    text = f"Final validation loss after {comparison.tokens:,} training tokens in windows of {comparison.context:,}"
    return f"{text}; {spread}{apart}."


def _detail(comparison: Comparison, variant: Variant) -> Detail:
    facts = [(f"d_ff of {name}", f"{width:,}") for name, width in variant.widths.items()]
    facts += [
        ("Parameters", f"{variant.n_params:,}"),
        ("Training FLOPs", f"{variant.flops_per_token:,} per token"),
        ("Learning rate", q.learning_rate(variant.learning_rate)),
        ("Step", f"{q.duration(variant.step_seconds)}, median of the timing pass"),
    ]
    if variant.difference is not None and variant.difference.p_different is not None:
        needed = variant.difference.seeds_to_decide
        facts += [
            ("Different", f"p = {q.probability(variant.difference.p_different)}, two-sided, after Holm"),
            ("Same within δ", f"p = {q.probability(variant.difference.p_same)}, two one-sided, after Holm"),
            ("Seeds to decide", "over 1,000" if needed is None else f"{needed:,}, in 8 of 10 experiments"),
        ]
    heads, rows = table.seed_lines(comparison, variant)
    return Detail(variant, facts, heads, rows, escape.fence(variant.config))


def _markdown(context: dict[str, Any]) -> str:
    return environment(False).get_template("report.md.jinja").render(context)


def _page(context: dict[str, Any]) -> str:
    templates = importlib.resources.files("tensorformer.report") / "templates"
    css = theme.css() + (templates / "page.css").read_text(encoding="utf-8")
    scripts = [_bundle(), (templates / "page.js").read_text(encoding="utf-8")] if context["figures"] else []
    specs = {f"chart-{f.key}": _spec(f, context["comparison"]) for f in context["figures"]}
    return (
        environment(True)
        .get_template("page.html.jinja")
        .render(context, css=css, scripts=scripts, charts=escape.script_json(specs), policy=policy(scripts))
    )
