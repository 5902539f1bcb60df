"""Numbers as a reader meets them: digits by the interval, a proper minus, thin units, a dash for what is absent."""

from __future__ import annotations

import math

from tensorformer.lab.results import Estimate, Ratio

ABSENT = "—"
MINUS = "−"
THIN = "\u202f"  # narrow no-break space, between a number and its unit
LEAST_DECIMALS, MOST_DECIMALS = 3, 5
UNKNOWN_DECIMALS = 4  # where no interval says how many digits mean something


def number(value: float, decimals: int) -> str:
    """Return ``value`` with fixed ``decimals``, thousands grouped; zero has no sign."""
    if not math.isfinite(value):
        return "diverged"
    text = f"{value:,.{decimals}f}"
    if text.startswith("-"):
        return MINUS + text[1:] if text.strip("-0.,") else text[1:]
    return text


def signed(value: float, decimals: int) -> str:
    """Return ``value`` with its sign always written, unless it rounds to zero."""
    text = number(value, decimals)
    return text if text.startswith(MINUS) or not text.strip("0.,") else "+" + text


def significant(value: float, digits: int = 3) -> str:
    """Return ``value`` to so many significant digits, never with an exponent."""
    if value == 0:
        return "0"
    return number(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def scaled(value: float, unit: str, at_least: float = 1.0) -> str:
    """Return ``value`` to three digits with a decimal prefix before ``unit``.

    Args:
        value: In units.
        unit: Written after the prefix; may be empty.
        at_least: The largest prefix is taken that leaves the number no smaller than this.

    Returns:
        ``0.84 M`` for ``(840_000, "", 0.1)``.
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * at_least:
            return f"{significant(value / factor)}{THIN}{prefix}{unit}"
    return f"{significant(value)}{THIN}{unit}".rstrip(THIN)


def size(count: int) -> str:
    """Return bytes in decimal megabytes or gigabytes."""
    return scaled(count, "B") if abs(count) >= 1e6 else f"{significant(count / 1e6, 2)}{THIN}MB"


def duration(seconds: float) -> str:
    """Return seconds in the unit that leaves two or three digits before the reader."""
    for unit, factor in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * factor:
            return f"{significant(seconds / factor)}{THIN}{unit}"
    return f"{significant(seconds * 1e3)}{THIN}ms"


def percent(share: float) -> str:
    """Return a signed relative distance in percent, with two decimals."""
    return f"{signed(share * 100, 2)}{THIN}%"


def share(value: float) -> str:
    """Return a share of one in percent, with one decimal."""
    return f"{number(value * 100, 1)}{THIN}%"


def share_parts(estimate: Estimate) -> tuple[str, str]:
    """Return the mean share in percent, and ``± half width`` or an empty text where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return share(estimate.mean), ""
    return share(estimate.mean), f"± {number((estimate.high - estimate.low) * 50, 1)}"


def share_level(estimate: Estimate) -> str:
    """Return ``mean ± half width`` in percent, or the mean alone."""
    return " ".join(share_parts(estimate)).rstrip()


def learning_rate(value: float) -> str:
    """Return a learning rate as people write it in recipes."""
    return f"{value:.4g}" if value >= 1e-4 else f"{value:.2e}"


def decimals(estimate: Estimate) -> int:
    """Return how many decimals the interval's half width allows: it shows 2 digits up to 35, else 1 (PDG's rule)."""
    if estimate.low is None or estimate.high is None or estimate.high <= estimate.low:
        return UNKNOWN_DECIMALS
    half = (estimate.high - estimate.low) / 2
    return min(MOST_DECIMALS, max(LEAST_DECIMALS, -math.floor(math.log10(half / 3.55))))


def level_parts(estimate: Estimate) -> tuple[str, str]:
    """Return the mean, and ``± half width`` or an empty text where there is no interval."""
    places = decimals(estimate)
    if estimate.low is None or estimate.high is None:
        return number(estimate.mean, places), ""
    return number(estimate.mean, places), f"± {number((estimate.high - estimate.low) / 2, places)}"


def level(estimate: Estimate) -> str:
    """Return ``mean ± half width``, or the mean alone."""
    return " ".join(level_parts(estimate)).rstrip()


def interval(estimate: Estimate) -> str:
    """Return ``low … high`` with signs, or a dash."""
    if estimate.low is None or estimate.high is None:
        return ABSENT
    places = decimals(estimate)
    return f"{signed(estimate.low, places)} … {signed(estimate.high, places)}"


def ratio(value: Ratio | None) -> str:
    """Return a ratio to the baseline, with its bound where the measured range ended first."""
    if value is None:
        return ABSENT
    text = f"{number(value.value, 2)}×"
    return f"{value.bound}{THIN}{text}" if value.bound else text


def ratio_interval(value: Ratio | None) -> str:
    """Return the interval of a ratio, or an empty text."""
    if value is None or value.bound or value.low is None or value.high is None:
        return ""
    return f"{number(value.low, 2)} … {number(value.high, 2)}"


def probability(value: float | None) -> str:
    """Return a p-value to two significant digits."""
    if value is None:
        return ABSENT
    return "< 0.0001" if value < 1e-4 else significant(value, 2)
