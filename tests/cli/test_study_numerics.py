"""`tensorformer study numerics` as a person meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro

from tensorformer.cli.study_numerics import Numerics
from tensorformer.errors import ConfigError, GateError


def command(*arguments: str) -> Numerics:
    omit = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    return tyro.cli(Numerics, args=arguments, config=omit)


def test_the_answer_is_short_and_ends_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    command("torch.nn.functional:gelu", "gelu").run()
    out = capsys.readouterr().out
    lines = out.rstrip().splitlines()
    assert lines[0] == "torch.nn.functional:gelu, said to be gelu"
    assert lines[-1].startswith("right definition, approximated in float32: tails lost: 17 % off at x = -5")
    assert len(lines) < 25
    assert max(map(len, lines[:-1])) <= 120
    for question in ("definition", "derivative", "approximation", "rounding, float32", "fusion, bfloat16", "tails"):
        assert f"\n{question} " in out
    assert "100.0% once, at the end" in " ".join(out.split())


def test_parameters_layout_and_dtypes(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "study_mine.py").write_text(
        "import torch.nn.functional as F\n"
        "def act(x):\n"
        "    g, u = x.chunk(2, -1)\n"
        "    return F.silu(g.clamp(max=10)) * u.clamp(-10, 10)\n"
    )
    arguments = ("study_mine:act", "swiglu_clamped", "--set", "limit=7", "--layout", "gate_up", "--dtypes", "float16")
    command(*arguments).run()
    out = capsys.readouterr().out
    assert "said to be swiglu_clamped(limit=7.0), gate_up" in out
    assert "limit is 10, not 7" in out.splitlines()[-1]
    assert "fusion, float16" in out
    assert "fusion, bfloat16" not in out


def test_what_fits_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    command("torch:sin", "silu").run()
    out = capsys.readouterr().out
    assert "not judged: it fits no formula" in out
    assert "no known mistake explains it" in out


def test_none_leaves_a_softcap_out(capsys: pytest.CaptureFixture[str]) -> None:
    command("tensorformer.gates:SCALARS.identity", "situ_value", "--set", "linear_beta=none").run()
    assert "said to be situ_value(linear_beta=None)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch.nn.functional:silu", "silu", "--set", "limit"], "write name=number, such as --set limit=7"),
        (["torch.nn.functional:silu", "silu", "--set", "limit=x"], "--set limit=x: write name=number"),
        (["torch.nn.functional:silu", "silu", "--set", "limit=7"], "'silu' has no parameter 'limit'"),
        (["torch.nn.functional:silu", "situ"], "needs beta"),
        (["torch.nn.functional:silu", "sillu"], "did you mean 'silu'"),
        (["torch.nn.functional:sillu", "silu"], "did you mean 'silu'"),
        (["silu", "silu"], "write module:function"),
    ],
)
def test_mistakes_say_what_to_write(arguments: list[str], words: str) -> None:
    with pytest.raises((ConfigError, GateError)) as e:
        command(*arguments).run()
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_parameters_behind_a_colon_are_shown_the_way() -> None:
    with pytest.raises(ConfigError, match="write the name alone, situ --set beta=4 --set linear_beta=25"):
        command("fast", "situ:beta=4,linear_beta=25").run()
