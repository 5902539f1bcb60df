"""What experts did as the rows that charts and tables are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tensorformer.lab.results import Comparison, ExpertLayer, Point, Variant
from tensorformer.report import quantities as q
from tensorformer.report.series import Row, common_steps, marks, mean, ordered

Layers = dict[int, list[ExpertLayer]]  # layer of the model -> one of each seed


class LoadClass(NamedTuple):
    """How much of an even load an expert has."""

    name: str
    least: float  # in even loads


CLASSES = (
    LoadClass("4× and more", 4.0),
    LoadClass("1½× to 4×", 1.5),
    LoadClass("¾× to 1½×", 3 / 4),
    LoadClass("¼× to ¾×", 1 / 4),
    LoadClass("under ¼×", 5e-324),  # any token at all
    LoadClass("no token", 0.0),
)


def by_layer(points: list[Point]) -> Layers:
    """Return the experts of one evaluation by layer; nothing where a seed has none."""
    found = [{experts.layer: experts for experts in point.experts} for point in points]
    layers = set.intersection(*map(set, found)) if found else set()
    return {layer: [seed[layer] for seed in found] for layer in sorted(layers)}


def along(variant: Variant) -> list[tuple[int, Layers]]:
    """Return the evaluations of a variant that have experts: training tokens, and the experts by layer."""
    found = [(points[0].tokens, by_layer(points)) for points in common_steps(variant).values()]
    return [(tokens, layers) for tokens, layers in found if layers]


def last(variant: Variant) -> Layers:
    """Return the experts at the last evaluation, by layer; nothing in a dense model."""
    found = along(variant)
    return found[-1][1] if found else {}


def without(comparison: Comparison) -> list[str]:
    """Return the names of the variants that have no experts to show."""
    return [variant.name for variant in ordered(comparison) if not last(variant)]


def evenness(comparison: Comparison) -> list[Row]:
    """Return the load entropy along training, mean over layers: mean over seeds, and the lowest and highest seed."""
    rows: list[Row] = []
    for variant, mark in marks(comparison):
        for tokens, layers in along(variant):
            by_seed = [mean([e.entropy for e in seed]) for seed in zip(*layers.values(), strict=True)]
            rows.append(
                mark
                | {"tokens": tokens, "entropy": mean(by_seed), "low": min(by_seed), "high": max(by_seed)}
                | {"least": min(mean([e.entropy for e in seeds]) for seeds in layers.values())}
            )
    return rows


def loads(comparison: Comparison) -> list[Row]:
    """Return one row a variant, layer and class of load at the end: which share of the experts is in it.

    Seeds number their experts each in its own way, so the experts of all seeds are counted together.
    """
    rows: list[Row] = []
    for variant, mark in marks(comparison):
        for layer, seeds in last(variant).items():
            found = sorted((load * len(e.load) for e in seeds for load in e.load), reverse=True)
            n_experts, start = len(found) / len(seeds), 0
            for kind, members in _by_class(found):
                end = start + len(members)
                rows.append(
                    mark
                    | {"layer": layer, "load": kind.name, "from": start / len(found), "to": end / len(found)}
                    | {"experts": f"{few(len(members) / len(seeds))} of {few(n_experts)}"}
                    | {"span": _span(members[-1], members[0])}
                )
                start = end
    return rows


def _by_class(loads: list[float]) -> list[tuple[LoadClass, list[float]]]:
    """Sort loads, given in even loads, the fullest first, into the classes that have any."""
    found: dict[LoadClass, list[float]] = {}
    for load in loads:
        found.setdefault(next(kind for kind in CLASSES if load >= kind.least), []).append(load)
    return list(found.items())


def _span(low: float, high: float) -> str:
    texts = [f"{q.number(load, 2)}×" for load in (low, high)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} … {texts[1]}"


def routed_shares(comparison: Comparison) -> list[Row]:
    """Return the routed share of the output's norm at the end, one row a variant and layer.

    ``at`` is the layer moved a little, so that variants do not cover one another.
    """
    rows: list[Row] = []
    found = [(mark, last(variant)) for variant, mark in marks(comparison)]
    found = [(mark, layers) for mark, layers in found if layers]
    spread = min(0.08, 0.5 / len(found)) if found else 0.0  # layers between neighbours
    for i, (mark, layers) in enumerate(found):
        for layer, seeds in layers.items():
            shares = [e.routed_share for e in seeds]
            rows.append(
                mark
                | {"layer": layer, "at": layer + spread * (i - (len(found) - 1) / 2)}
                | {"share": mean(shares), "low": min(shares), "high": max(shares)}
            )
    return rows


def fullest(layers: Layers) -> tuple[float, int]:
    """Return the load of the fullest expert in even loads, mean over seeds, in the layer where it is largest."""
    found = [(mean([e.max_over_mean for e in seeds]), layer) for layer, seeds in layers.items()]
    return max(found, key=lambda pair: pair[0])


def total(layers: Layers, of: Callable[[ExpertLayer], float]) -> float:
    """Return a quantity summed over layers, mean over seeds."""
    return sum(mean([of(e) for e in seeds]) for seeds in layers.values())


def few(count: float) -> str:
    """Return a mean count: whole where it is whole, else with one decimal."""
    return q.number(count, 1).removesuffix(".0")
