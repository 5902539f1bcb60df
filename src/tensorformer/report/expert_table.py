"""The table of one variant's experts, a line a layer."""

from __future__ import annotations

from tensorformer.lab.results import ExpertLayer, Variant
from tensorformer.report import expert_series as series
from tensorformer.report import quantities as q
from tensorformer.report.series import mean
from tensorformer.report.table import Column

HEADS = [
    Column("Layer"),
    Column("Load entropy", "1 is even"),
    Column("Fullest", "× even"),
    Column("No token", "experts"),
    Column("Confidence"),
    Column("Similarity"),
    Column("Routed", "of output"),
]


def expert_lines(variant: Variant) -> list[list[str]]:
    """Return the statistics of a variant's experts at the last evaluation, means over seeds.

    Args:
        variant: a finished one.

    Returns:
        Cells in the order of ``HEADS``, a line a mixture of experts; nothing in a dense model.
    """
    return [_line(layer, seeds) for layer, seeds in series.last(variant).items()]


def _line(layer: int, seeds: list[ExpertLayer]) -> list[str]:
    alike = [e.similarity for e in seeds if e.similarity is not None]
    dead = series.few(mean([float(e.dead) for e in seeds]))
    return [
        str(layer),
        q.number(mean([e.entropy for e in seeds]), 3),
        q.number(mean([e.max_over_mean for e in seeds]), 2),
        f"{dead} of {len(seeds[0].load)}",
        q.number(mean([e.confidence for e in seeds]), 3),
        q.number(mean(alike), 3) if alike else q.ABSENT,
        q.share(mean([e.routed_share for e in seeds])),
    ]
