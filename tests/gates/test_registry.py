"""The catalogue as others see it: names, aliases, and activations of installed packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch

from tensorformer.errors import GateError
from tensorformer.gates import GATES, SCALARS, Gate, Scalar, activation, registry
from tensorformer.gates.registry import Catalogue
from tensorformer.testing import assert_laws
from tensorformer.testing.laws import assert_limits

SERPENT = Scalar("serpent", "x*sigmoid(a*x) - tanh(x)/4", ("0.25", "oo"), "here", {"a": "> 0"}, aliases=("snake2",))
SERPENT_GLU = Gate("serpent_glu", SERPENT, SCALARS["identity"], "here")


def installed(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    """Let a package `elsewhere` with these attributes declare each of them as an entry point."""
    module = ModuleType("elsewhere")
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    points = [EntryPoint(name, f"elsewhere:{name}", registry.GROUP) for name in contents]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])


def catalogue(kind: type, *entries: object) -> Catalogue:
    return Catalogue(kind, entries)  # pyright: ignore


def test_activations_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, one=SERPENT, two=(SERPENT_GLU,))
    scalars, gates = catalogue(Scalar, SCALARS["silu"]), catalogue(Gate)
    assert list(scalars) == ["silu", "serpent"]
    assert scalars["snake2"] is SERPENT
    assert "snake2" in scalars
    assert list(gates) == ["serpent_glu"]


def test_the_laws_are_one_line_for_an_activation_of_another_package() -> None:
    assert_laws(SERPENT_GLU)


def test_the_laws_refuse_a_wrong_limit_and_a_wrong_tail() -> None:
    with pytest.raises(AssertionError, match="declared limit"):
        assert_laws(Scalar("serpent", "x*sigmoid(x) - tanh(x)/4", ("0", "oo"), "here"))
    # 1 − σ(−x) for σ(x): the same function, but the left tail has no digits.
    with pytest.raises(AssertionError, match=r"flat\(-"):
        assert_laws(Scalar("flat", "1 - sigmoid(-x)", ("0", "1"), "here"))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"silu": Scalar("silu", "x", ("-oo", "oo"), "here")}, "there is an activation 'silu' already"),
        ({"thing": 3}, "'int' object is not iterable"),
        ({"things": [3]}, "it must be a Scalar, a Gate, or a sequence of them"),
    ],
)
def test_a_broken_package_takes_nothing_else_with_it(
    monkeypatch: pytest.MonkeyPatch, contents: dict, reason: str
) -> None:
    installed(monkeypatch, **contents, good=SERPENT)
    scalars = catalogue(Scalar, SCALARS["silu"])
    with pytest.warns(UserWarning, match=reason):
        assert list(scalars) == ["silu", "serpent"]
    assert scalars["silu"] is SCALARS["silu"]


def test_aliases_are_the_same_function() -> None:
    x = torch.linspace(-3, 3, 31)
    for alias, name in (("gelu_new", "gelu_tanh"), ("quick_gelu", "gelu_quick"), ("linear", "identity")):
        assert SCALARS[alias] is SCALARS[name]
        assert alias not in list(SCALARS)
        assert activation(alias).name == name
        assert torch.equal(SCALARS[alias](x), SCALARS[name](x))
    assert GATES["swigluoai"] is GATES["swiglu_oai"]
    assert len({*SCALARS, *(a for s in SCALARS.values() for a in s.aliases)}) == len(SCALARS) + sum(
        len(s.aliases) for s in SCALARS.values()
    )


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(GateError, match="did you mean 'gelu_new'"):
        SCALARS["gelu_nwe"]
    assert SCALARS.get("nothing") is None


def test_two_threads_that_first_use_two_activations() -> None:
    """Each gets its own kernel: building takes long enough for the two to meet."""
    code = """
import threading, torch
from tensorformer.gates import SCALARS
x, got, start = torch.tensor([-1.0, 2.0]), {}, threading.Barrier(2)
def use(name):
    start.wait()
    got[name] = SCALARS[name](x)
threads = [threading.Thread(target=use, args=(n,)) for n in ("gelu", "mish")]
[t.start() for t in threads]; [t.join() for t in threads]
for name in got:
    exact = torch.tensor([float(v) for v in SCALARS[name].oracle(x)])
    torch.testing.assert_close(SCALARS[name](x), exact)
    torch.testing.assert_close(got[name], exact)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_slow_growth_is_growth() -> None:
    for formula in ("select(x, 0, 0, sqrt(1 + relu(x)) - 1)", "log(1 + relu(x))"):
        assert_limits(Scalar("slow", formula, ("0", "oo"), "here"))


def test_the_laws_try_other_values_and_the_formula_without() -> None:
    assert_laws(Scalar("even", "x**2*sigmoid(x)", ("0", "oo"), "here"))
    for wrong in (
        Scalar("wrong", "x*sigmoid(b*x)", ("0", "oo"), "here", {"b": ">= 0"}, without=("7*x", ("0", "oo"))),
        Scalar("wrong", "beta*tanh(x/beta)", ("-4", "4"), "here", {"beta": "> 0"}),
    ):
        with pytest.raises(AssertionError, match="declared limit"):
            assert_laws(wrong)
