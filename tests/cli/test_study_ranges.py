"""``tensorformer study ranges`` as a person meets it: a run, a text, made inputs, and mistakes in one line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tensorformer.cli.study_ranges import Ranges, parse_gate
from tensorformer.cli.study_ranges_tables import show
from tensorformer.config.load import load_config, variant_run
from tensorformer.data.prepare import prepare
from tensorformer.errors import CheckpointError, ConfigError, DataError, GateError, TensorformerError
from tensorformer.lab.train import train
from tensorformer.study.ranges import compared, synthetic_ranges


@pytest.fixture
def run_folder(home: Path) -> Path:
    """Train the tiny recipe for a few steps."""
    torch.set_num_threads(1)
    run = variant_run(load_config("tiny.toml"), "swiglu", 0)
    train(run, home / "r", prepare(run.data), torch.device("cpu"))
    return home / "r"


def measured(tmp_path: Path, **options: object) -> dict[str, object]:
    """Run the command and return what it wrote."""
    Ranges(json=tmp_path / "ranges.json", device="cpu", **options).run()  # pyright: ignore[reportArgumentType]
    return json.loads((tmp_path / "ranges.json").read_text("utf-8"))


def mistake(**options: object) -> str:
    """Run a command that must fail and return its one line."""
    with pytest.raises(TensorformerError) as caught:
        Ranges(**options).run()  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_on_its_own_text_and_on_another(
    run_folder: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(home, run_folder=run_folder, tokens=300)
    printed = capsys.readouterr().out
    for word in ("288 tokens", "layers.0.ffn swiglu", "layers.1.ffn", "product h", "nvfp4", "situ(4, 25)", "dead"):
        assert word in printed
    assert found["source"] == str(run_folder)
    assert found["tokens"] == 288  # whole windows of 16
    layers = found["layers"]
    assert isinstance(layers, list)
    assert [len(layer["instead"]) for layer in layers] == [3, 3]
    assert layers[0]["inside"]["gate"]["count"] == 288 * 40

    (home / "a.txt").write_text("line 5 of document 7\n" * 9)
    (home / "b.jsonl").write_text('{"text": "é"}\n')
    other = measured(home, run_folder=run_folder, text=("a.txt", "b.jsonl"), gate=("swiglu", "glu"))
    assert other["tokens"] == 16 * ((189 + 2 + 2) // 16)  # both texts, an end before and behind each
    assert [p["gate"] for p in other["layers"][0]["instead"]] == ["glu"]  # pyright: ignore[reportIndexIssue]
    first = measured(home, run_folder=run_folder, text=("a.txt",), tokens=5)
    assert first["tokens"] == 5
    (home / "one.txt").write_text("x")
    assert measured(home, run_folder=run_folder, text=("one.txt",))["tokens"] == 2

    (home / "corpus" / "new.txt").write_text("a text that was not there before\n" * 50)
    assert mistake(run_folder=run_folder) == f"{run_folder}: the text it was trained on has changed since; {MEND}"
    monkeypatch.chdir(run_folder)
    assert "does not exist" in mistake(run_folder=run_folder) or MEND in mistake(run_folder=run_folder)
    monkeypatch.chdir(home)

    for checkpoint in run_folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert "has no checkpoint yet" in mistake(run_folder=run_folder)


MEND = "name a text to read with --text"


def test_made_inputs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(home, synthetic=True, tokens=40, gate=("situ:beta=2,linear_beta=none", "glu"))
    assert [layer["own"]["gate"] for layer in found["layers"]] == 2 * [  # pyright: ignore[reportGeneralTypeIssues]
        "situ(beta=2.0, linear_beta=None)",
        "glu",
    ]
    assert "no capped gate was measured beside one without caps" in capsys.readouterr().out


def test_every_line_fits_a_hundred_columns() -> None:
    out = io.StringIO()
    result = synthetic_ranges(compared(), 20)
    show(result, Console(file=out, width=100, highlight=False, markup=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in out.getvalue()
    cells = {len(line.split()) for line in lines if line.startswith("product h ")}
    assert cells == {12}  # "product", "h" and ten figures: nothing was cut off
    assert sum(line.startswith("gate g ") for line in lines) == 2  # once a kind of input


def test_the_default_gates_are_those_the_help_names() -> None:
    named = ["swiglu", "situ:beta=4,linear_beta=25", "bilinear", "swiglu_clamped:limit=10"]
    assert [repr(parse_gate(n)) for n in named] == [repr(g) for g in compared()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("swigl", "--gate swigl: unknown activation 'swigl'; did you mean 'swiglu'"),
        ("silu", "--gate silu: a function of one input; name a gate of two, such as swiglu"),
        ("situ", "--gate situ: 'situ' needs beta (> 0) and linear_beta"),
        ("situ", "(as --gate situ:key=number,key=number)"),
        ("situ:beta=4", "needs linear_beta"),
        ("situ:beta=four,linear_beta=25", "'beta=four' is no number; write situ:key=number,key=number"),
        ("situ:beta", "'beta' is no number"),
        ("situ:beta=-4,linear_beta=25", "beta must be a finite number > 0, not -4.0"),
        ("swiglu:beta=4", "has no parameter 'beta'"),
        ("", "unknown activation ''"),
    ],
)
def test_a_gate_that_is_no_gate(text: str, words: str) -> None:
    with pytest.raises(GateError) as caught:
        parse_gate(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_are_one_line(home: Path) -> None:
    assert "not a run" in mistake(run_folder=home / "nowhere")
    assert "one of the two" in mistake()
    assert "one of the two" in mistake(run_folder=home, synthetic=True)
    assert "one of the two" in mistake(synthetic=True, text=("a.txt",))
    assert "--tokens 0: write 1 or more" in mistake(synthetic=True, tokens=0)
    assert "--seed -1" in mistake(synthetic=True, seed=-1)
    assert "did you mean 'bilinear'" in mistake(synthetic=True, gate=("bilinaer",))
    assert issubclass(GateError, ConfigError)


def test_a_text_that_is_missing_or_empty(run_folder: Path, home: Path) -> None:
    (home / "empty.txt").write_text("")
    (home / "binary.txt").write_bytes(b"\x00\x01")
    for name, words in (("missing.txt", "does not exist"), ("empty.txt", "empty"), ("binary.txt", "binary file")):
        error = mistake(run_folder=run_folder, text=(name,))
        assert name in error
        assert words in error
        assert "data.source" not in error
    with pytest.raises(DataError):
        Ranges(run_folder=run_folder, text=("missing.txt",)).run()
    with pytest.raises(CheckpointError):
        Ranges(run_folder=home / "corpus").run()
