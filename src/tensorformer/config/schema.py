"""What a recipe may say: one tree of frozen structs, which TOML is decoded into and nothing else is read from.

Unknown keys, wrong types and values out of range are refused while decoding, with the path of the culprit.
Sizes are in tokens, widths in features, learning rates per optimiser step, losses in nats per token.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Depth = Annotated[int, Meta(ge=1, le=10_000)]
Count = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Several = Annotated[int, Meta(ge=2, le=1_000_000)]  # different tokens to tell apart
Fraction = Annotated[float, Meta(ge=0, le=1)]
Power = Annotated[float, Meta(gt=0, le=10)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)]  # it becomes a folder


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of a recipe."""


# What text, cut into which tokens.


class Bytes(Section, frozen=True, tag_field="kind", tag="bytes"):
    """One token a byte; byte 0, which no text contains, ends a document."""


class BPE(Section, frozen=True, tag_field="kind", tag="bpe"):
    """Byte-level byte-pair encoding, trained on the training documents and cached."""

    vocab_size: Annotated[int, Meta(ge=257)]


class TokenizerFile(Section, frozen=True, tag_field="kind", tag="file"):
    """Any ``tokenizer.json``; ``end_of_document`` names the token that separates documents."""

    path: str
    end_of_document: str


class Recall(Section, frozen=True, tag_field="kind", tag="recall"):
    """Key-value pairs, and later each key alone: which value went with it? (Multi-query associative recall.)"""

    pairs: Positive
    keys: Several = 64  # that pairs are made of, all different in an example
    values: Several = 64
    power: Power = 0.01  # of the distances from the pairs to their queries; 1: evenly, less: mostly near

    @property
    def vocab_size(self) -> int:
        """Tokens it uses."""
        return 1 + self.keys + self.values


class Induction(Section, frozen=True, tag_field="kind", tag="induction"):
    """A passage of different symbols, repeated to the end: what followed this symbol before?"""

    shortest: Several  # symbols of the passage, which are drawn for each example
    longest: Several
    symbols: Several = 64  # there are

    @property
    def vocab_size(self) -> int:
        """Tokens it uses."""
        return 1 + self.symbols


class SelectiveCopying(Section, frozen=True, tag_field="kind", tag="selective_copying"):
    """Symbols strewn among blanks: which were they, in order?"""

    copied: Positive  # symbols to remember
    symbols: Several = 16  # there are

    @property
    def vocab_size(self) -> int:
        """Tokens it uses."""
        return 2 + self.symbols


class Needle(Section, frozen=True, tag_field="kind", tag="needle"):
    """One key-value pair in a haystack, and at its end the key: which value went with it?"""

    depths: tuple[Fraction, Fraction] = (0.0, 1.0)  # where the pair may be: 0 at the beginning, 1 just before the end
    keys: Positive = 16
    symbols: Several = 64  # of the hay, and of the value

    @property
    def vocab_size(self) -> int:
        """Tokens it uses."""
        return 1 + self.keys + self.symbols


Probe = Recall | Induction | SelectiveCopying | Needle


class Data(Section, frozen=True):
    """Where the text comes from and how it is split, by document, never by window; or a generated task instead."""

    source: str | tuple[str, ...] = "stdlib"  # "stdlib", or files, folders and globs of text and .jsonl
    text_field: str = "text"  # the field of a .jsonl line that holds the text
    tokenizer: Bytes | BPE | TokenizerFile = Bytes()
    validation: Share = 0.05  # share of the documents that is kept for the final loss
    tuning: Share = 0.05  # share that only the choice of a learning rate may see
    probe: Probe | None = None  # a task to train and judge on in the place of text


# What is built.


class SoftmaxAttention(Section, frozen=True, tag_field="kind", tag="softmax_attention"):
    """Scaled dot-product attention with grouped heads, and rotary positions or none."""

    n_heads: Positive
    n_kv_heads: Positive | None = None  # None: as many as n_heads
    head_dim: Positive | None = None  # None: d_model / n_heads
    position: Literal["rope", "none"] = "rope"  # none: NoPE, where other layers tell positions apart
    rope_theta: PositiveFloat | None = None  # None: 10,000
    qk_norm: bool = False  # RMSNorm without gain on every head's q and k
    window: Positive | None = None  # a token sees itself and the window − 1 before it; None: all


LinearPreset = Literal[
    "bilinear",
    "bilinear_norm",
    "bilinear_decay",
    "bilinear_delta",
    "power",
    "linear",
    "retention",
    "gla",
    "ssd",
    "gdn",
    "kda",
]
# On each head's output: nothing, division by the number of keys, RMSNorm; power's row sum and ssd's are their own.
OutputNorm = Literal["none", "position", "rms", "row", "gated_rms"]
OutputGate = Literal["none", "sigmoid", "swish"]  # of x, after the norm


class LinearAttention(Section, frozen=True, tag_field="kind", tag="linear_attention"):
    """Attention without softmax: the scores are a product of one or two dot products; its state has a fixed size."""

    preset: LinearPreset
    n_heads: Positive
    n_key_heads: Positive | None = None  # heads of queries and keys, which neighbouring heads share; None: the preset's
    head_dim: Positive | None = None  # key features of each branch; None: d_model / n_heads
    value_dim: Positive | None = None  # None: d_model / n_heads
    rope_theta: PositiveFloat | None = None  # None: 10,000 where the preset has rotary positions
    output_norm: Literal["none", "position", "rms"] | None = None  # None: the preset's
    output_gate: OutputGate | None = None  # None: the preset's
    max_beta: PositiveFloat | None = None  # of the delta rule, 1 at most; None: 1, or 2 with allow_neg_eigval
    allow_neg_eigval: bool = False  # lets max_beta be as large as 2: a step may then turn what it finds around


class Learned(Section, frozen=True):
    """A parameter of an activation that is trained, from this value on."""

    learned: float


class FeedForward(Section, frozen=True, tag_field="kind", tag="feed_forward"):
    """Two matrices around a scalar activation, or three around a gate: the gate's name decides."""

    # "swiglu", { name = "situ", beta = 4.0, linear_beta = 25.0 }, or { name = "swish_glu", beta = { learned = 1.0 } }
    gate: str | dict[str, str | float | int | Learned]
    d_ff: Positive
    bias: bool = False


class Experts(Section, frozen=True):
    """Experts of one kind: two matrices around a scalar activation, or three around a gate, with biases or without."""

    gate: str | dict[str, str | float | int | Learned]  # as in a feed-forward table; a learned number is one an expert
    d_ff: Positive  # of each
    bias: bool = False


class Router(Section, frozen=True):
    """Which experts a token goes to, and with which weights."""

    top_k: Positive
    scores: Literal["softmax", "sigmoid", "softmax_after_top_k"] = "softmax"  # of the logits of all experts, or chosen
    norm_topk_prob: bool = True  # weights of a token sum to one (before the scaling factor)
    routed_scaling_factor: PositiveFloat = 1.0
    n_group: Positive = 1  # groups of neighbouring experts; a token chooses among the best topk_group of them
    topk_group: Positive = 1
    bias: bool = False  # of the logits, trained


class Balance(Section, frozen=True):
    """What keeps the load of the experts even; a coefficient of 0 leaves a loss out."""

    aux_loss: Literal["layer", "model", "sequence"] = "layer"  # over what load and probability are averaged
    aux_loss_load: Literal["per_token", "per_choice"] = "per_choice"  # of an even load the loss is top_k, or 1
    aux_loss_coef: NonNegativeFloat = 0.0
    z_loss_coef: NonNegativeFloat = 0.0
    bias_update_speed: NonNegativeFloat = 0.0  # of the loss-free bias, a step; about 0.001


class MoE(Section, frozen=True, tag_field="kind", tag="moe"):
    """A mixture of experts: each token goes to ``router.top_k`` routed experts, and to every shared one."""

    n_experts: Positive  # routed
    routed: Experts
    router: Router
    shared: Experts | None = None
    n_shared_experts: Positive = 1  # where ``shared`` is there
    balance: Balance = Balance()
    latent: Positive | None = None  # width that routed experts work in, projected down to and up from; None: d_model


class Layer(Section, frozen=True):
    """``repeat`` blocks, each of the named mixer followed by the named feed-forward part."""

    mixer: str
    ffn: str
    repeat: Depth = 1


class Model(Section, frozen=True):
    """A pre-norm decoder; ``layers`` is cycled until ``n_layers`` blocks are there."""

    d_model: Positive
    n_layers: Depth
    mixers: dict[str, SoftmaxAttention | LinearAttention]
    ffns: dict[str, FeedForward | MoE]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1)]
    vocab_size: Positive = 256  # at least the tokenizer's
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: PositiveFloat = 1e-6
    tie_embeddings: bool = False


# How it is trained.


class AdamW(Section, frozen=True, tag_field="kind", tag="adamw"):
    """AdamW for every parameter; weight decay on matrices only."""

    lr: PositiveFloat
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class Muon(Section, frozen=True, tag_field="kind", tag="muon"):
    """Muon for the hidden matrices at AdamW's scale of step, AdamW for embeddings, head, norms and stacked experts."""

    lr: PositiveFloat
    momentum: Share = 0.95
    weight_decay: NonNegativeFloat = 0.1
    adamw_betas: tuple[Share, Share] = (0.9, 0.95)
    adamw_eps: PositiveFloat = 1e-8


class Cosine(Section, frozen=True, tag_field="kind", tag="cosine"):
    """Linear warm-up, then a half cosine down to ``final`` of the peak."""

    warmup_steps: Count
    final: Annotated[float, Meta(ge=0, le=1)] = 0.1


class WarmupStableDecay(Section, frozen=True, tag_field="kind", tag="wsd"):
    """Linear warm-up, a constant stretch, and a linear decay to ``final`` over the last ``decay`` of the steps."""

    warmup_steps: Count
    decay: Share = 0.2
    final: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Train(Section, frozen=True):
    """One run: ``tokens`` in batches of ``batch_size`` windows of ``context`` tokens."""

    tokens: Positive
    context: Annotated[int, Meta(ge=2)]
    batch_size: Positive  # windows an optimiser step
    optimizer: AdamW | Muon
    schedule: Cosine | WarmupStableDecay
    micro_batch_size: Positive | None = None  # windows a forward pass; None: the whole batch
    grad_clip: PositiveFloat | None = 1.0
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    evaluate_every: Positive = 100  # steps
    evaluate_tokens: Positive = 65_536  # of the validation part, during training
    final_tokens: Positive = 262_144  # of the validation part, for the final loss
    checkpoint_every: Positive = 200  # steps


class Compare(Section, frozen=True):
    """What is compared with what, what is held equal, and when a difference counts."""

    baseline: str
    seeds: Annotated[tuple[Count, ...], Meta(min_length=1)]
    delta: PositiveFloat  # nats per token: differences below it do not matter
    # "active": parameters that a token meets; mixtures of experts have two widths, and can be matched in both
    match: Literal["params", "active", "params_and_active", "flops", "none"] = "params"
    multiple_of: Positive = 4  # widths that are solved for are multiples of this
    tolerance: PositiveFloat = 0.005  # relative
    data_to_match: bool = False  # train the baseline at 0.5×, 1× and 2× the tokens
    learning_rates: tuple[PositiveFloat, ...] = ()  # tried for every variant on the tuning part
    contexts: tuple[Positive, ...] = (1, 2, 4)  # final loss at these multiples of the training context


class Recipe(Section, frozen=True):
    """A whole recipe file: a base run, and the variants to compare, each a set of overrides."""

    name: Name
    model: Model
    train: Train
    data: Data = Data()
    compare: Compare | None = None
    variants: dict[Name, dict[str, object]] = {}


class Run(Section, frozen=True):
    """One training run, fully resolved: what its folder records and its hash is taken of."""

    data: Data
    model: Model
    train: Train
    seed: Count
