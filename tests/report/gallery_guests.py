"""A small catalogue to which another package, through an entry point, has added names that try everything."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from tensorformer.gates import GATES, SCALARS, Gate, Scalar, registry
from tensorformer.report import gallery, gallery_entries

EVIL = "<script>window.pwned = 1</script>"
GUESTS = (
    Scalar(EVIL, "x*sigmoid(new*x)", ("0", "oo"), EVIL, {"new": "> 0"}, models=(EVIL,), aliases=(f"{EVIL}2",)),
    Gate(f"'\"><img src=x onerror=window.pwned=1> & {EVIL}", SCALARS["silu"], SCALARS["tanh"], "</style>", (EVIL,)),
    Gate("</script><!--", SCALARS["softcap"].bind(c=3.0), SCALARS["identity"], "another package's"),
    Gate("---", SCALARS["silu"], SCALARS["identity"], "another package's"),
    Gate("- -", SCALARS["silu"], SCALARS["identity"], "another package's"),
)


def invite(monkeypatch: pytest.MonkeyPatch) -> int:
    """Put the guests into the catalogue that the gallery shows; returns how many entries that has."""
    point = EntryPoint("guests", f"{__name__}:GUESTS", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    kept = {name for _, *names in gallery.PAIRS for name in names}
    scalars = registry.Catalogue(Scalar, [s for s in SCALARS.values() if s.name in kept])
    gates = registry.Catalogue(Gate, [g for g in GATES.values() if g.name in kept])
    monkeypatch.setattr(gallery_entries, "SCALARS", scalars)
    monkeypatch.setattr(gallery_entries, "GATES", gates)
    return len(scalars) + len(gates)
