"""Comparisons to draw: realistic numbers that are the same on every call, and texts that try to break out."""

from __future__ import annotations

import math

from msgspec import structs

from tensorformer.lab.results import (
    Comparison,
    Corpus,
    Difference,
    Estimate,
    ExpertLayer,
    Point,
    Ratio,
    SeedResult,
    Variant,
    Verdict,
)

TOKENS = 1_638_400
CONTEXT = 256
UNSAFE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>|`*_[a](javascript:1)\u2028&{{7*7}}"
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 8: 2.365}

NAMES = {
    "swiglu": "SwiGLU feed-forward, softmax attention",
    "bilinear": "SwiGLU with the SiLU taken out",
    "geglu": "GELU in place of SiLU",
    "hybrid 3:1": "Three layers of bilinear attention to one of softmax",
    "bilinear attention": "No softmax anywhere; fixed-size state",
}
GAPS = [0.0, 0.004, -0.0013, 0.031, 0.074, -0.018, 0.012, 0.002, 0.055, -0.006, 0.024, 0.041]
OWN = [0.0, 0.0045, 0.0012, 0.003, 0.0045, 0.0015, 0.006]  # a variant's own noise, beside what a seed shares
DELTA = 0.01


def noise(*key: int) -> float:
    """Return a repeatable number in (−1, 1)."""
    x = math.sin(sum((i + 1) * 12.9898 * (k + 1) for i, k in enumerate(key))) * 43758.5453
    return 2 * (x - math.floor(x)) - 1


def estimate(values: list[float]) -> Estimate:
    """Return mean and t-interval."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return Estimate(mean, None, None, 1)
    half = T_QUANTILE[n] * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Estimate(mean, mean - half, mean + half, n)


def judge(found: Estimate) -> Verdict:
    """Return the verdict that the interval suggests."""
    if found.low is None or found.high is None:
        return "undecided"
    if max(-found.low, found.high) < DELTA:
        return "same"
    return "worse" if found.low > 0 else "better" if found.high < 0 else "undecided"


def seed_result(i: int, seed: int, gap: float, step_seconds: float, scale: float) -> SeedResult:
    """Return one run: a power law with the seed's own noise, shared by all variants, and a little of its own."""
    shared = 0.011 * noise(seed, 7) * scale
    curve = []
    for step in range(50, 801, 50):
        tokens = step * 2048
        loss = 1.42 + 2.9 * (tokens / 40_000) ** -0.55 + shared + gap * (1 + 0.4 * (1 - step / 800))
        loss += 0.004 * noise(i, seed, step) * scale
        curve.append(Point(step, tokens, step * step_seconds * (1 + 0.03 * noise(i, seed)), loss))
    final = 1.795 + shared + gap + OWN[i % len(OWN)] * noise(i, seed, 1) * scale
    by_context = {c: final + shift for c, shift in ((256, 0.0), (512, -0.012 + 0.3 * gap), (1024, -0.015 + 0.9 * gap))}
    return SeedResult(seed, final, final / math.log(2) / 3.1, by_context, curve)


def make_variant(name: str, description: str, i: int, seeds: list[int], base: Variant | None, scale: float) -> Variant:
    """Return one variant; ``base`` is None for the baseline."""
    gap = GAPS[i % len(GAPS)] * (1 if scale == 1 else scale)
    step_seconds = 0.144 * (1 + 0.05 * noise(i, 3))
    runs = [seed_result(i, seed, gap, step_seconds, scale) for seed in seeds]
    difference = data = time = None
    if base is not None:
        pairs = {r.seed: r.loss - b.loss for r, b in zip(runs, base.seeds, strict=True)}
        found = estimate(list(pairs.values()))
        kind = judge(found)
        p = (
            (None, None)
            if found.low is None
            else (0.31 if kind == "undecided" else 0.004, 0.02 if kind == "same" else 1.0)
        )
        left = None if found.low is None or i == 6 else 9 if kind == "undecided" else len(seeds)
        difference = Difference(found, pairs, *p, kind, left)
        ratio = 2 ** (gap / 0.075)
        data = Ratio(2.0, None, None, ">") if i == 4 else Ratio(ratio, ratio * 0.93, ratio * 1.08)
        data = Ratio(0.5, None, None, "<") if i == 5 else data
        time = Ratio(data.value * 1.02, data.low, data.high, data.bound)
    contexts = {c: estimate([r.context_losses[c] for r in runs]) for c in runs[0].context_losses}
    grid = {"0.001": 1.871 + gap, "0.002": 1.822 + gap, "0.004": 1.835 + gap}
    config = f"seed_free = true\n\n[model]\nd_model = 128\nn_layers = 4\n\n[train]\ntokens = {TOKENS}  # {name}\n"
    return Variant(
        name=name,
        description=description,
        n_params=842_112 + 640 * i,
        flops_per_token=5_112_832 + 12_288 * i,
        widths={"dense": 344 if i == 0 else 344 + 4 * i},
        remainder=640 * i / 842_112,
        learning_rate=0.002,
        learning_rate_losses=grid,
        loss=estimate([r.loss for r in runs]),
        bits_per_byte=estimate([r.bits_per_byte for r in runs if r.bits_per_byte is not None]),
        difference=difference,
        data_to_match=data,
        time_to_match=time,
        context_losses=contexts,
        step_seconds=step_seconds,
        tokens_per_second=2048 / step_seconds,
        peak_memory=213_000_000 + 1_700_000 * i,
        seeds=runs,
        config=config,
    )


def make_comparison(names: dict[str, str] | None = None, seeds: int = 3, scale: float = 1.0) -> Comparison:
    """Return a finished comparison; the first name is the baseline."""
    names = NAMES if names is None else names
    variants: list[Variant] = []
    for i, (name, description) in enumerate(names.items()):
        variants.append(
            make_variant(name, description, i, list(range(seeds)), variants[0] if variants else None, scale)
        )
    lengths = {TOKENS // 2: 1.872, TOKENS: variants[0].loss.mean, TOKENS * 2: 1.741}
    curve = {
        t: Estimate(v, v - 0.012, v + 0.012, seeds) if seeds > 1 else Estimate(v, None, None, 1)
        for t, v in lengths.items()
    }
    corpus = Corpus("Python standard library, 3.11", "bytes", 256, 1204, 13_412_880, 63, 702_118, 262_144)
    return Comparison(
        name="demo",
        recipe_path="recipes/demo.toml",
        created="2025-11-29T23:05:12Z",
        baseline=next(iter(names)),
        match="params",
        tolerance=0.005,
        delta=DELTA,
        tokens=TOKENS,
        context=CONTEXT,
        seeds=list(range(seeds)),
        corpus=corpus,
        machine={"CPU": "AMD EPYC 9R14, 2 cores", "PyTorch": "2.13.0", "runs side by side": "2", "device": "cpu"},
        variants=variants,
        notes=[
            "Matched in parameters; the largest remainder is +0.30% (bilinear attention).",
            "Every variant saw the same tokens in the same order at the same seed.",
        ],
        baseline_curve=curve,
    )


def expert_layer(layer: int, counts: list[int], routed_share: float, similarity: float | None = 0.04) -> ExpertLayer:
    """Return what experts that got these numbers of choices did."""
    total, n = sum(counts), len(counts)
    load = [count / total for count in counts]
    entropy = -sum(share * math.log(share) for share in load if share) / math.log(n) if n > 1 else 1.0
    return ExpertLayer(
        layer, load, entropy, n * max(load), counts.count(0), 0.3 + layer / 100, similarity, routed_share
    )


def with_experts(
    made: Comparison, n_experts: int = 16, layers: tuple[int, ...] = (0, 1, 2), dense: tuple[str, ...] = ()
) -> Comparison:
    """Return the comparison as if its variants were mixtures of experts, all but the ``dense`` ones."""
    variants = []
    for i, v in enumerate(made.variants):
        seeds = [
            structs.replace(s, curve=[_routed(p, i, s.seed, n_experts, layers, v.name in dense) for p in s.curve])
            for s in v.seeds
        ]
        active = v.n_params if v.name in dense else 301_184 + 64 * i
        variants.append(structs.replace(v, seeds=seeds, n_active=active))
    return structs.replace(made, variants=variants)


def _routed(p: Point, i: int, seed: int, n_experts: int, layers: tuple[int, ...], dense: bool) -> Point:
    found = []
    for layer in () if dense else layers:
        steep = (1.5 + 0.3 * layer) * (1 - p.step / 1600)  # deeper layers are less even, and all get better
        noisy = [math.exp(steep * noise(i + 1, seed + 1, layer + 1, e + 1)) - 0.4 for e in range(n_experts)]
        counts = [max(0, round(100 * share)) for share in noisy]
        found.append(expert_layer(layer, counts, 0.35 + 0.05 * layer + 0.04 * noise(i, seed, layer)))
    return structs.replace(p, experts=found)
