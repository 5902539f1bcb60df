"""What a study of ranges found, as data; every term is explained in ``LEGEND``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PERCENTS = (0.1, 1.0, 50.0, 99.0, 99.9)

LEGEND = {
    "gate g, up u": "what the two projections give; a two-matrix layer has only the up projection",
    "φ(g), ψ(u)": "the two halves of the gate; left out where one is the identity",
    "product h": "φ(g)·ψ(u), or φ(u) with two matrices: the input of the down projection",
    "shares": "of all finite values; NaN and ±inf are counted beside and enter nothing else",
    "percentiles": "linear between the neighbouring values, each read from a histogram to within 0.2 % of itself",
    "kurtosis": "E[(x − mean)⁴] / variance²: 3 for a normal distribution; none without any spread",
    "outliers": "share of values with |x| > 6·rms, that threshold within 0.2 %",
    "saturated": "share of inputs from which on outwards the output stays within 1 % of its limit (within "
    "0.01 of a limit that is 0), at the low and at the high end",
    "dead": "units whose product is 0 on every token; faint: others whose |φ| stays below 1 % of the layer's rms of φ",
    "signal-to-noise": "‖y‖² / ‖ŷ − y‖² in dB, y the output of the down projection and ŷ the same from the product "
    "after quantising and back, the weights as they are. Of all tokens together: of the two sums, which the largest "
    "tokens decide. Of a token: of each by itself, the mean of the dB",
    "formats": "int8 and fp8 have a scale a token, int8/128 one for 128 neighbours, mxfp8 for 32, nvfp4 for 16 and "
    "another for the batch",
    "worst token": "the largest ‖ŷ − y‖ / ‖y‖ of a token",
    "bound": "the largest |h| that the gate's formula allows",
    "same inputs": "every gate is given the same g and u and the same down projection; each is judged against its own "
    "exact output, so this says what a format costs, not whether a model would be as good",
}


@dataclass(frozen=True)
class Summary:
    """The distribution of one quantity; what no finite value defines is None."""

    count: int  # finite values
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    percentiles: dict[str, float]  # "0.1" -> value; empty without a finite value
    kurtosis: float | None
    outliers: float  # share
    zeros: float  # share
    negative: float  # share

    @property
    def amax(self) -> float:
        """The largest finite magnitude; 0 without one."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))


@dataclass(frozen=True)
class Saturation:
    """One side on which a half of a gate no longer answers, and how many inputs lie there."""

    limit: float  # of the output
    at: float  # inputs at it, and beyond it on this side, are saturated
    share: float


@dataclass(frozen=True)
class Dead:
    """Units of a layer that give nothing on any token seen."""

    units: int
    zero: int  # the product is 0 on every token
    faint: int  # besides: |φ| never reaches 1 % of the layer's rms of φ


@dataclass(frozen=True)
class Effect:
    """What one number format does to the output of the down projection.

    Decibels are None where there is no error at all (``error`` is 0), or nothing to measure (``error`` is None).
    ``worst_token`` is None where a token's error is not finite: its output was 0 and no longer is, or overflowed.
    """

    format: str
    group: int | None  # values that share a scale; None: the format's own rule, a token for int8 and fp8
    snr_db: float | None  # of all tokens together
    token_snr_db: float | None  # of each token by itself, the mean
    error: float | None  # √(mean ‖ŷ − y‖²) over tokens, in the units of y
    worst_token: float | None  # largest ‖ŷ − y‖ / ‖y‖
    tokens: int
    left_out: int  # tokens whose exact output is not finite

    @property
    def label(self) -> str:
        """The format with its group, such as ``int8/128``."""
        return self.format if self.group is None else f"{self.format}/{self.group}"


@dataclass(frozen=True)
class Product:
    """One gate on a layer's inputs."""

    gate: str
    bound: float | None  # of |h|; None: there is none
    product: Summary
    saturation: dict[str, Saturation]  # "phi low", "phi high", "psi low", "psi high", where there is a limit
    output: float | None  # √(mean ‖y‖²) over tokens, y the output of the down projection
    effects: list[Effect]


@dataclass(frozen=True)
class Layer:
    """One feed-forward layer, or one kind of synthetic input, with one gate."""

    name: str
    inside: dict[str, Summary]  # "gate", "phi", "up", "psi", where there are such
    own: Product
    dead: Dead
    instead: list[Product]  # other gates on the same inputs

    @property
    def products(self) -> list[Product]:
        """The layer's own gate, then the others."""
        return [self.own, *self.instead]


@dataclass(frozen=True)
class Ranges:
    """A finished study."""

    source: str
    tokens: int  # in each layer
    layers: list[Layer]
    findings: list[str]  # what caps on the gate bought here, and what they did not
    legend: dict[str, str]

    def sites(self) -> Iterator[tuple[str, list[Product]]]:
        """Yield every set of inputs with all the gates that were measured on it."""
        together: dict[str, list[Product]] = {}
        for layer in self.layers:
            together.setdefault(layer.name, []).extend(layer.products)
        yield from together.items()
