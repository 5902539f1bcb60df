"""What a study of routing found, as data; every term is explained in ``LEGEND``."""

from __future__ import annotations

from dataclasses import dataclass

Values = list[float | None]  # None where no row says anything

SCALES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # that all queries of a layer are multiplied by
GAINS = tuple((i / 10, (i + 1) / 10) for i in range(10))  # weight a key gained over the row's mass before
CHANGES = ("added", "grown")  # what happens to a key
GROWN = 1.5  # times the key that was there

LEGEND = {
    "weight A[i, j]": "what step j's value is multiplied by in step i's sum, before output norm, gate and projection; "
    "signed where the mixer has no softmax",
    "row": "the weights of one step; step i sees i + 1 keys, its own among them",
    "row_sum": "Σ_j A[i, j], the mean over rows; row_sum_deviation is their standard deviation",
    "row_mass": "Σ_j |A[i, j]|",
    "share": "|A[i, j]| over the row's mass",
    "negative_share": "share of the mass in negative weights",
    "entropy": "−Σ share · log(share) of a row, in nats",
    "evenness": "entropy over log(i + 1), what it would be if all keys had the same share",
    "effective_keys": "exp(entropy): how many keys of the same share would be as mixed",
    "top_share": "the largest share of a row",
    "sum_rms": "root mean square over a head's values of Σ_j A[i, j] v[j], before norm, gate and projection",
    "output": "root mean square over the model's width of what the layer adds to the residual stream",
    "distance": "share of one key at distance i − j, over rows in the second half of the training context",
    "log_odds": "log of the strongest over the second strongest weight, median over the same rows, at each scale",
    "scale": "what the queries are multiplied by where they meet the keys, behind any norm of them; what a "
    "layer adds of a step's own value besides (Mamba-2's D · v) is a weight that no query scales",
    "added": "one key is there, against the same row without it",
    "grown": f"one key is {GROWN} times itself, behind any norm of it, where that gives it more weight",
    "gain": "the weight that the key gained, over the row's mass before",
    "rate": "mass that the other keys lost for each unit of weight that the key gained, median over rows: 1 where "
    "all compete for a fixed sum, 0 where a key's weight is its own business; rates are those of each bin of gain",
}


@dataclass(frozen=True)
class Exchange:
    """What a key that gains weight takes from the others."""

    rate: float | None
    rows: int
    rates: Values  # of the rows in each of GAINS


@dataclass(frozen=True)
class Head:
    """One head of one layer."""

    curves: dict[str, Values]  # quantity -> one value for each bin of the run's ``keys``
    distance: Values  # one for each bin of the run's ``distances``
    log_odds: Values  # one for each of SCALES
    top_share: Values  # likewise
    exchange: dict[str, Exchange]  # one for each of CHANGES


@dataclass(frozen=True)
class Layer:
    """One layer's mixer."""

    index: int
    mixer: str  # the recipe's name of it
    heads: list[Head]
    output: Values  # one for each bin of the run's ``keys``
    left_out: int  # rows of all heads in which a weight is not finite


@dataclass(frozen=True)
class Run:
    """One model on one text."""

    name: str
    context: int  # tokens of a training window
    windows: int
    length: int  # tokens of a measured window
    keys: list[tuple[int, int]]  # bins of the number of keys that a row sees, first and last
    distances: list[tuple[int, int]]  # bins of the distance, likewise
    layers: list[Layer]


@dataclass(frozen=True)
class Routing:
    """A finished study."""

    text: str  # what was read
    scales: tuple[float, ...]
    gains: tuple[tuple[float, float], ...]
    runs: list[Run]
    findings: list[str]
    legend: dict[str, str]
