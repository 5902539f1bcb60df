"""What a comparison found, as data: written to ``results.json``, drawn by ``report``."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Match = Literal["params", "active", "params_and_active", "flops", "none"]
MATCHED_IN: dict[Match, str] = {  # in words
    "params": "parameters",
    "active": "active parameters",
    "params_and_active": "parameters and active parameters",
    "flops": "FLOPs",
    "none": "nothing",
}
Verdict = Literal["better", "worse", "same", "undecided"]


class Estimate(Struct, frozen=True):
    """A mean over seeds with its 95 % t-interval; no interval with one seed."""

    mean: float
    low: float | None
    high: float | None
    n: int


class Ratio(Struct, frozen=True):
    """A ratio to the baseline; ``bound`` is ``"<"`` or ``">"`` where the measured range ends before the answer.

    Seeds beyond both ends leave the value without an interval and without a bound.
    """

    value: float
    low: float | None
    high: float | None
    bound: Literal["", "<", ">"] = ""


class Difference(Struct, frozen=True):
    """Paired difference to the baseline over seeds (variant − baseline, nats per token; negative is better)."""

    estimate: Estimate
    per_seed: dict[int, float]
    p_different: float | None  # two-sided paired t-test, after Holm
    p_same: float | None  # the larger of two one-sided tests at ±delta, after Holm
    verdict: Verdict
    seeds_to_decide: int | None  # seeds that would decide it in 8 of 10 experiments; None: over 1,000, or one seed


class ExpertLayer(Struct, frozen=True):
    """What the experts of one layer did with a piece of validation text."""

    layer: int  # of the model, from 0
    load: list[float]  # share of the choices that fell on each routed expert
    entropy: float  # of the load, divided by its largest: 1 where it is even
    max_over_mean: float  # load of the fullest expert, in even loads
    dead: int  # experts that no token went to
    confidence: float  # mean over tokens of the router's largest probability
    similarity: float | None  # mean cosine between what two experts write for one token; None: a single expert
    routed_share: float  # ‖routed‖ / (‖routed‖ + ‖shared‖) of what the paths write, mean over tokens


class Point(Struct, frozen=True):
    """One evaluation during training."""

    step: int
    tokens: int
    seconds: float  # of training, evaluations left out
    loss: float  # nats per token on the validation part
    accuracy: float | None = None  # of a probe's answers
    experts: list[ExpertLayer] = []  # one a mixture of experts


class SeedResult(Struct, frozen=True):
    """One finished run."""

    seed: int
    loss: float  # final, nats per token, or per answer of a probe
    bits_per_byte: float | None  # None: a probe
    context_losses: dict[int, float]  # context length in tokens -> nats per token
    curve: list[Point]
    context_accuracies: dict[int, float] = {}  # of a probe's answers


class Variant(Struct, frozen=True):
    """Everything known about one variant."""

    name: str
    description: str
    n_params: int
    flops_per_token: int  # forward and backward, at the training context
    widths: dict[str, int]  # d_ff of every feed-forward part in use
    remainder: float  # relative distance from the baseline in what was matched
    learning_rate: float
    learning_rate_losses: dict[str, float]  # the grid, on the tuning part; empty without a grid
    loss: Estimate
    bits_per_byte: Estimate | None  # None: a probe
    difference: Difference | None  # None for the baseline
    data_to_match: Ratio | None  # data it needs for the baseline's loss, relative to the baseline
    time_to_match: Ratio | None
    context_losses: dict[int, Estimate]
    step_seconds: float  # median of the interleaved timing pass
    tokens_per_second: float
    peak_memory: int  # bytes that training takes at its peak, over what its process held before; 0: not known
    seeds: list[SeedResult]
    config: str  # TOML of the resolved run, seed left out
    context_accuracies: dict[int, Estimate] = {}  # of a probe's answers, by context length in tokens
    n_active: int | None = None  # parameters that a token meets; None: written before there were mixtures of experts


class Corpus(Struct, frozen=True):
    """What the runs were trained and judged on."""

    source: str
    tokenizer: str
    vocab_size: int
    train_documents: int
    train_tokens: int
    validation_documents: int
    validation_tokens: int
    validation_tokens_used: int


class Probe(Struct, frozen=True):
    """The generated task that the runs were trained and judged on in the place of a corpus."""

    name: str
    description: str
    vocab_size: int
    answers: dict[int, int]  # scored, by context length in tokens
    chance: float  # accuracy of a guess among all possible answers
    perfect: dict[int, float]  # accuracy of an exact solver on the same answers, by context length


FORMAT = 1  # rises when a field changes its meaning


class Comparison(Struct, frozen=True):
    """A finished comparison."""

    name: str
    recipe_path: str  # as it was typed; may be empty
    created: str  # ISO 8601, UTC
    baseline: str
    match: Match
    tolerance: float
    delta: float
    tokens: int
    context: int
    seeds: list[int]
    corpus: Corpus | None  # None: a probe
    machine: dict[str, str]  # what it ran on: label -> text
    variants: list[Variant]
    notes: list[str]  # what a reader must know before believing the table
    baseline_curve: dict[int, Estimate]  # data-to-match: tokens -> the baseline's final loss; empty without it
    format: int = FORMAT
    probe: Probe | None = None
