"""From a drawing to what shows it: a specification for the page, a picture, and the script that draws."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from tensorformer.files import write_bytes
from tensorformer.report import series, theme
from tensorformer.report.pen import Drawing, configure

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
PNG_WIDTH = 600
PNG_SCALE = 2.0


def wide(drawing: Drawing) -> dict[str, Any]:
    """Return the specification of a picture."""
    return finish(drawing.chart.properties(width=PNG_WIDTH), theme.PNG, drawing.datasets)


def responsive(drawing: Drawing) -> dict[str, Any]:
    """Return the specification of a figure as wide as the page, which a parameter brings one variant out of."""
    chart = drawing.chart.add_params(alt.param(name="focus", value=""))
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    spec = finish(chart.properties(width="container", autosize=fit), theme.PAGE, drawing.datasets)
    del spec["$schema"]  # an address nobody needs to ask for
    return spec


def finish(chart: Any, to: theme.Theme, datasets: dict[str, list[series.Row]]) -> dict[str, Any]:
    """Return a chart's specification, themed, with its data."""
    return configure(chart, to).to_dict() | {"datasets": datasets}


def png(spec: dict[str, Any]) -> bytes:
    """Return the picture of a specification."""
    return vl_convert.vegalite_to_png(spec | {"padding": 14}, vl_version=VEGA_LITE, scale=PNG_SCALE)


def write_pictures(folder: Path, pictures: Mapping[str, bytes], names: Iterable[str]) -> None:
    """Write pictures by their file's name, and remove those of ``names`` that an earlier page had and this has not."""
    for name in {*names, *pictures}:
        if name in pictures:
            write_bytes(folder / name, pictures[name])
        else:
            (folder / name).unlink(missing_ok=True)


@functools.cache
def bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script without imports."""
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("the Vega bundle would end its own script element")
    return text
