"""Where a gate is saturated and how large its product can be, for every gate there is."""

from __future__ import annotations

import math

import pytest
import torch

from tensorformer.gates import GATES, SCALARS, Gate, Scalar
from tensorformer.study.ranges_limits import TOLERANCE, SaturationCount, bound, cutoffs
from tests.gates.gate_laws import GATE_NAMES, SCALAR_NAMES, gate, scalar

INF = math.inf


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_beyond_a_cutoff_a_function_stays_at_its_limit_and_just_inside_it_does_not(name: str) -> None:
    f = scalar(name)
    limits = f(torch.tensor([-INF, INF], dtype=torch.float64)).tolist()
    found = cutoffs(f)
    assert found.keys() == {side for side, limit in zip(("low", "high"), limits, strict=True) if math.isfinite(limit)}
    for side, (limit, at) in found.items():
        assert limit == limits[side == "high"]
        outwards = 1 if side == "high" else -1
        tolerance = TOLERANCE * (abs(limit) or 1)
        further = at + outwards * torch.logspace(-6, 4, 2000, dtype=torch.float64)
        assert (f(further) - limit).abs().max() <= tolerance * (1 + 1e-9)
        inside = torch.tensor(at - outwards * 1e-6 * (1 + abs(at)), dtype=torch.float64)
        assert abs(float(f(inside)) - limit) > tolerance


@pytest.mark.parametrize(
    ("half", "low", "high"),
    [
        (SCALARS["relu"], 0.01, None),
        (SCALARS["identity"], None, None),
        (SCALARS["sigmoid"], -math.log(99), math.log(99)),
        (SCALARS["tanh"], -math.atanh(0.99), math.atanh(0.99)),
        (SCALARS["clip"].bind(limit=10.0), -9.9, 9.9),
        (SCALARS["softcap"].bind(c=30.0), -30 * math.atanh(0.99), 30 * math.atanh(0.99)),
    ],
    ids=str,
)
def test_cutoffs_that_can_be_worked_out(half: Scalar, low: float | None, high: float | None) -> None:
    sides = {"low": low, "high": high}
    assert {side: at for side, (_, at) in cutoffs(half).items()} == pytest.approx(
        {side: at for side, at in sides.items() if at is not None}
    )


@pytest.mark.parametrize("name", GATE_NAMES)
def test_no_product_exceeds_the_bound_and_some_come_near(name: str) -> None:
    line = torch.cat((torch.linspace(-40, 40, 1601), torch.tensor([-1e4, -1e3, 1e3, 1e4]))).double()
    h = gate(name)(*torch.meshgrid(line, line, indexing="ij")).abs().max()
    limit = bound(gate(name))
    if limit is None:
        assert h > 1e4 / 2
    else:
        assert 0.99 * limit <= h <= limit * (1 + 1e-9)


def test_the_bound_of_soft_caps_is_their_product() -> None:
    assert bound(GATES["situ"].bind(beta=4.0, linear_beta=25.0)) == pytest.approx(100)
    assert bound(GATES["situ"].bind(beta=4.0, linear_beta=None)) is None
    assert bound(GATES["swiglu"]) is None
    assert bound(SCALARS["sigmoid"]) == 1


def test_planted_saturation_is_counted_piece_by_piece() -> None:
    count = SaturationCount(SCALARS["clip"].bind(limit=2.0))
    count.update(torch.tensor([[-5.0, -2.0, 0.0], [1.0, 1.97, 1.99]]))
    count.update(torch.tensor([3.0, math.nan, INF, -INF]))
    found = count.result()
    assert (found["low"].share, found["high"].share) == (2 / 7, 2 / 7)
    assert (found["low"].at, found["high"].at) == (pytest.approx(-1.98), pytest.approx(1.98))
    assert (found["low"].limit, found["high"].limit) == (-2, 2)


def test_relu_is_saturated_on_its_zero_side_only() -> None:
    count = SaturationCount(SCALARS["relu"])
    count.update(torch.tensor([-1.0, -2.0, 3.0, 100.0]))
    assert {side: s.share for side, s in count.result().items()} == {"low": 0.5}


def test_no_input_has_no_share_to_speak_of() -> None:
    found = SaturationCount(SCALARS["sigmoid"]).result()
    assert (found["low"].share, found["high"].share) == (0, 0)


def test_parameters_that_differ_from_unit_to_unit_have_no_single_cutoff() -> None:
    caps = SCALARS["softcap"].bind(c=torch.tensor([1.0, 2.0]))
    assert cutoffs(caps) == {}
    assert bound(Gate("capped", caps, SCALARS["tanh"], "")) is None
    assert cutoffs(SCALARS["softcap"].bind(c=torch.tensor(1.0)))["high"][1] == pytest.approx(math.atanh(0.99))
