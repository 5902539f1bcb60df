"""From a comparison to its files: the page, the Markdown and the pictures."""

from __future__ import annotations

import datetime
import importlib.resources
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from tensorformer.files import write_text
from tensorformer.lab.results import Comparison, Variant
from tensorformer.report import escape, expert_table, series, table, theme, vega, words
from tensorformer.report import quantities as q
from tensorformer.report.figures import ORDER, Figure, figures
from tensorformer.report.html import environment, policy
from tensorformer.report.pen import HEIGHT

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
    experts: list[list[str]]
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
    pictures = {figure.png: vega.png(vega.wide(figure.draw(comparison, theme.PNG))) for figure in drawn}
    summary = _summary(drawn, comparison)
    if summary is not None:
        pictures["summary.png"] = vega.png(summary)
    context = _context(comparison, drawn)
    markdown, page = _markdown(context), _page(context)
    vega.write_pictures(folder, pictures, KEYS)
    write_text(folder / "report.md", markdown)
    write_text(folder / "report.html", page)
    return folder / "report.html"


KEYS = [f"{key}.png" for key in (*ORDER, "summary")]


def _summary(drawn: list[Figure], comparison: Comparison) -> dict[str, Any] | None:
    second = "curves" if comparison.probe is None else "accuracy"
    panels = [figure for figure in drawn if figure.key in ("difference", second)]
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
    return vega.finish(both, theme.PNG, datasets)


def _context(comparison: Comparison, drawn: list[Figure]) -> dict[str, Any]:
    rates, grid = table.rate_lines(comparison)
    lines = table.lines(comparison)
    command = f"tensorformer compare {shlex.quote(comparison.recipe_path or f'{comparison.name}.toml')}"
    variants = series.ordered(comparison)
    return {
        "comparison": comparison,
        "answer": words.answer(comparison),
        "setting": _setting(comparison),
        "unit": series.unit(comparison),
        "columns": table.columns(comparison),
        "lines": lines,
        "table_caption": table.caption(comparison),
        "notes": words.notes(comparison),
        "figures": drawn,
        "labels": series.labels(comparison),
        "looks": theme.looks([v.name for v in variants], comparison.baseline),
        "outlines": OUTLINES,
        "rates": rates,
        "grid": grid,
        "details": [_detail(comparison, variant) for variant in variants],
        "expert_heads": expert_table.HEADS,
        "expert_mean": f", mean over {words.count(len(comparison.seeds), 'seed')}" if len(comparison.seeds) > 1 else "",
        "facts": table.facts(comparison),
        "command": command,
        "command_fence": escape.fence(command),
    }


def _setting(comparison: Comparison) -> str:
    n = len(comparison.variants)
    parts = [words.count(n, "variant"), words.count(len(comparison.seeds), "seed")]
    parts += [f"{q.scaled(comparison.tokens, '', 0.1)} tokens a run", f"context {comparison.context:,}"]
    return " · ".join([*parts, series.source(comparison), _when(comparison.created)])


def _when(created: str) -> str:
    """Return an ISO time to the minute, or the text itself where it is not one."""
    try:
        return datetime.datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return created


def _detail(comparison: Comparison, variant: Variant) -> Detail:
    facts = [(f"d_ff of {name}", f"{width:,}") for name, width in variant.widths.items()]
    facts.append(("Parameters", f"{variant.n_params:,}"))
    if table.is_sparse(variant):
        facts.append(("Active parameters", f"{variant.n_active:,}, those that a token meets"))
    facts += [
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
    return Detail(variant, facts, heads, rows, expert_table.expert_lines(variant), escape.fence(variant.config))


def _markdown(context: dict[str, Any]) -> str:
    return environment(False).get_template("report.md.jinja").render(context)


def _page(context: dict[str, Any]) -> str:
    templates = importlib.resources.files("tensorformer.report") / "templates"
    css = theme.css() + (templates / "page.css").read_text(encoding="utf-8")
    scripts = [vega.bundle(), (templates / "page.js").read_text(encoding="utf-8")] if context["figures"] else []
    specs = {f"chart-{f.key}": vega.responsive(f.draw(context["comparison"], theme.PAGE)) for f in context["figures"]}
    return (
        environment(True)
        .get_template("page.html.jinja")
        .render(context, css=css, scripts=scripts, charts=escape.script_json(specs), policy=policy(scripts))
    )
