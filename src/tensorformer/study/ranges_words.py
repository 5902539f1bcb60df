"""What caps on a gate bought, put into a sentence by the figures alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median as _median

from tensorformer.study.ranges_result import Effect, Product

NOTICEABLE = 1.0  # dB
REFERENCE = "swiglu"  # what the capped gates of the catalogue come from

Pair = tuple[Product, Product]  # without and with caps, on the same inputs


def findings(sites: Sequence[list[Product]], where: str) -> list[str]:
    """Return a sentence for every capped gate: what it buys over a gate without caps on the same inputs.

    Args:
        sites: one list for each set of inputs: all the gates that were measured on it.
        where: what the inputs are, which the sentences begin with.
    """
    names = list(dict.fromkeys(p.gate for products in sites for p in products))
    by_site = [{p.gate: p for p in products} for products in sites]
    capped = [n for n in names if any(n in s and s[n].bound is not None for s in by_site)]
    free = [n for n in names if n not in capped]
    if not capped:
        return []
    if not free:
        return [f"{where}: every gate measured is capped, and none without caps shows what that buys"]
    reference = REFERENCE if REFERENCE in free else free[0]
    pairs = {n: [(s[reference], s[n]) for s in by_site if n in s and reference in s] for n in capped}
    return [f"{where}: {_sentence(both)}" for both in pairs.values() if both]


def _sentence(pairs: list[Pair]) -> str:
    return "; ".join(part(pairs) for part in (_reach, _formats, _errors, _outliers, _price))


def _reach(pairs: list[Pair]) -> str:
    free, capped = pairs[0]
    before, after = max(f.product.amax for f, _ in pairs), max(c.product.amax for _, c in pairs)
    assert capped.bound is not None
    reached = f"{capped.gate} bounds |h| by {number(capped.bound)} and reached {number(after)}"
    if before <= capped.bound:
        return f"{reached}, but {free.gate} stayed within that bound by itself, at {number(before)}"
    return f"{reached} where {free.gate} reached {number(before)}"


def _outliers(pairs: list[Pair]) -> str:
    before, after = (_median(p[i].product.outliers for p in pairs) for i in (0, 1))
    shares = f"outliers {percent(before)} → {percent(after)}"
    known = [(f.product.kurtosis, c.product.kurtosis) for f, c in pairs]
    both = [(f, c) for f, c in known if f is not None and c is not None]
    if not both:
        return shares
    tails = (_median(p[i] for p in both) for i in (0, 1))
    return shares + ", kurtosis " + " → ".join(map(number, tails))


def _formats(pairs: list[Pair]) -> str:
    """Return which formats gain and which lose, by the mean token: the sum over tokens is decided by the largest."""
    gains = {label: _median(d) for label, d in _by_format(pairs, _gain).items()}
    groups = {
        "buys": {label: d for label, d in gains.items() if d >= NOTICEABLE},
        "costs": {label: -d for label, d in gains.items() if d <= -NOTICEABLE},
    }
    listed = {verb: ", ".join(f"{label} {d:.1f} dB" for label, d in g.items()) for verb, g in groups.items()}
    same = ", ".join(label for label, d in gains.items() if abs(d) < NOTICEABLE)
    parts = [f"{verb} {formats}" for verb, formats in listed.items() if formats]
    if same:
        parts.append(f"changes {same} by less than 1 dB")
    return "signal-to-noise of a token: " + (", ".join(parts) or "unknown")


def _errors(pairs: list[Pair]) -> str:
    ratios = [_median(r) for r in _by_format(pairs, _error_ratio).values()]
    if not ratios:
        return "no error to compare"
    low, high = min(ratios), max(ratios)
    span = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    outputs = [c.output / f.output for f, c in pairs if f.output and c.output is not None]
    beside = f", its output {_median(outputs):.2f} times" if outputs else ""
    return f"its error is {span} times {pairs[0][0].gate}'s{beside}"


def _by_format(pairs: list[Pair], compare: Callable[[Effect, Effect], float | None]) -> dict[str, list[float]]:
    """Return each format's figures, one for each set of inputs where both gates have one."""
    found: dict[str, list[float]] = {}
    for free, capped in pairs:
        for f, c in zip(free.effects, capped.effects, strict=True):
            if (figure := compare(f, c)) is not None:
                found.setdefault(c.label, []).append(figure)
    return found


def _gain(free: Effect, capped: Effect) -> float | None:
    if free.token_snr_db is None or capped.token_snr_db is None:
        return None
    return capped.token_snr_db - free.token_snr_db


def _error_ratio(free: Effect, capped: Effect) -> float | None:
    return capped.error / free.error if free.error and capped.error is not None else None


def _price(pairs: list[Pair]) -> str:
    g, u = ([_at_caps(c, half) for _, c in pairs] for half in ("phi", "psi"))
    return f"{percent(_median(g))} of g and {percent(_median(u))} of u lie at its caps"


def _at_caps(product: Product, half: str) -> float:
    """Return the share of inputs at a limit that is a cap: 0 is the limit of gates without caps too."""
    return sum(s.share for key, s in product.saturation.items() if key.startswith(half) and s.limit)


def percent(share: float) -> str:
    """Return a share in per cent, to two digits where it is small."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def number(x: float) -> str:
    """Return three digits or so, in at most seven characters."""
    x = float(f"{x:.3g}")
    size = abs(x)
    if size and not 1e-3 <= size < 1e4:
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{x:,.0f}" if size >= 100 else f"{x:.1f}" if size >= 10 else f"{x:.2f}" if size >= 1 else f"{x:.3f}"
