"""The benchmark of gates: it says what it measures, and refuses a gate whose laws fail."""

from __future__ import annotations

import pytest
import torch

from tensorformer.bench import gates
from tensorformer.errors import GateError
from tensorformer.gates import GATES
from tensorformer.gates.examples import example
from tensorformer.ops.act_and_mul import fast


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "SHAPES", ((5, 2 * 7),))
    monkeypatch.setattr(gates, "WIDTHS", (4,))
    monkeypatch.setattr(gates, "TOKENS", (3,))
    monkeypatch.setattr(gates, "D_MODEL", 8)
    monkeypatch.setattr(gates.native, "why_not", lambda *_: "not here")


def test_the_lines_of_a_gate() -> None:
    lines = list(gates.run(["bilinear"], rounds=1, inductor=False))
    text = "\n".join(lines)
    assert "a copy moves" in lines[0]
    for label in ("float32 [5, 14] forward:", "float32 [5, 14] forward+backward:", "bf16 [5, 14] forward:"):
        assert sum(label in line for line in lines) == 1
    assert "native: not here" in text
    assert "fast 1.00" in next(line for line in lines if "kept for backward" in line)
    assert "float32 d_ff 4: 3 tokens" in text


def test_no_result_for_a_gate_whose_laws_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fast.backward

    def one_hundredth_off(gate, g, u, dh, dg, du) -> None:
        real(gate, g, u, dh * 1.01, dg, du)

    monkeypatch.setattr(fast, "backward", one_hundredth_off)
    lines = list(gates.run(["swiglu"], rounds=1, inductor=False))
    assert any("fast: no result:" in line for line in lines)
    assert not any("fast " in line for line in lines if "forward" in line)


@pytest.mark.parametrize("name", gates.GATE_NAMES)
def test_the_eager_formulas_are_the_gates(name: str) -> None:
    gate = example(GATES[name])
    g, u = torch.randn(2, 500, dtype=torch.float64) * 4
    torch.testing.assert_close(gates.EAGER[name](g, u, **gate.parameters), gate(g, u), rtol=1e-10, atol=1e-12)


def test_an_unknown_gate() -> None:
    with pytest.raises(GateError, match="did you mean 'swiglu'"):
        list(gates.run(["swigul"], rounds=1, inductor=False))
    with pytest.raises(GateError, match="has no formula"):
        list(gates.run(["square_glu"], rounds=1, inductor=False))
