"""The table of errors: it measures what it says, and the page of docs says what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tensorformer.gates import GATES, SCALARS, Scalar
from tensorformer.gates.examples import example
from tensorformer.study import precision as study
from tensorformer.study.precision import DTYPES, activations_page, precision

PAGE = Path(__file__).parents[2] / "docs" / "activations.md"


def test_the_documented_table_regenerates_unchanged() -> None:
    written = PAGE.read_text(encoding="utf-8")
    if f" {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.split('+')[0]}." in written:
        assert activations_page() == written
    # On another kind of CPU the last digits may differ: there at least every name and formula is the same.
    now = [line.split("|")[1:3] for line in activations_page().splitlines() if line.startswith("| `")]
    then = [line.split("|")[1:3] for line in written.splitlines() if line.startswith("| `")]
    assert [name for name, _ in now] == [name for name, _ in then]
    assert len(now) == 2 * len(SCALARS) + len(GATES)


def test_sixteen_bit_results_are_rounded_once() -> None:
    for scalar in SCALARS.values():
        for dtype in (torch.bfloat16, torch.float16):
            assert precision(example(scalar), dtype).value < 0.51, (scalar.name, dtype)


def test_errors_are_counted_in_ulp() -> None:
    exact = torch.tensor([1.0, 1.99, 2.0, 3e-39], dtype=torch.float64)
    ulps = study.ulp(exact, torch.float32)
    assert ulps.tolist() == [2.0**-23, 2.0**-23, 2.0**-22, 2.0**-149]


def test_what_is_wrong_is_seen() -> None:
    """1 − σ(−x) is σ(x), without a digit in the left tail of float32."""
    flat = Scalar("flat", "1 - sigmoid(-x)", ("0", "1"), "here")
    assert precision(flat, torch.float32).value > 1e6
    assert precision(SCALARS["sigmoid"], torch.float32).value < 3


def test_facts_about_torch() -> None:
    x = torch.tensor([-5.0, -6.5])
    theirs, exact = F.gelu(x).double(), SCALARS["gelu"](x.double())
    assert 0.16 < abs(theirs[0] / exact[0] - 1) < 0.18
    assert theirs[1] == 0
    ends = torch.tensor([torch.inf, -torch.inf])
    assert F.gelu(ends).isnan().any()
    assert F.silu(ends).isnan().any()
    assert not SCALARS["gelu"](ends).isnan().any()
    assert not SCALARS["silu"](ends).isnan().any()


@pytest.mark.parametrize(("error", "text"), [(0.0, "0"), (0.5, "0.50"), (0.501, "0.51"), (2.31, "2.4"), (173.2, "180")])
def test_stated_errors_are_bounds(error: float, text: str) -> None:
    assert study._stated(error) == text


def test_dtypes() -> None:
    assert list(DTYPES) == ["float32", "bfloat16", "float16"]
    mine = Scalar("mine", "x*x", ("oo", "oo"), "here")
    assert precision(mine, torch.float32).value == pytest.approx(0.5, abs=0.01)
