"""``tensorformer study routing`` as a person meets it: runs, a text, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tensorformer.cli.study_routing import Routing, short_names
from tensorformer.config.load import load_config, variant_run
from tensorformer.data.prepare import prepare
from tensorformer.errors import CheckpointError, DataError, TensorformerError
from tensorformer.lab.train import train

CONTEXT = 16


@pytest.fixture
def runs(home: Path) -> tuple[Path, Path]:
    """Train two variants of the tiny recipe for a few steps: softmax, and bilinear attention."""
    recipe = load_config("tiny.toml")
    for name in ("swiglu", "bilinear"):
        run = variant_run(recipe, name, 0)
        train(run, home / "runs" / name / "seed-0", prepare(run.data), torch.device("cpu"))
    return home / "runs" / "swiglu" / "seed-0", home / "runs" / "bilinear" / "seed-0"


def mistake(*folders: Path, **options: object) -> str:
    """Run a command that must fail and return its one line."""
    with pytest.raises(TensorformerError) as caught:
        Routing(folders=folders, **options).run()  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_runs_on_their_own_text_and_on_another(
    runs: tuple[Path, Path], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Routing(folders=runs, tokens=200, device="cpu").run()
    printed = capsys.readouterr().out
    for line in ("swiglu: the other keys lose 1.00 for each", "bilinear: the other keys lose 0.00 for each"):
        assert line in printed
    assert "The page: routing/routing.html" in printed
    assert {"routing.html", "routing.json", "added.png", "output.png"} <= {p.name for p in Path("routing").iterdir()}
    found = json.loads(Path("routing/routing.json").read_text("utf-8"))
    assert found["text"] == "the validation part"
    assert [run["name"] for run in found["runs"]] == ["swiglu", "bilinear"]
    assert [(run["context"], run["length"], run["windows"]) for run in found["runs"]] == [(16, 64, 3)] * 2
    assert [layer["index"] for layer in found["runs"][0]["layers"]] == [0, 1]

    Path("a.txt").write_text("line 5 of document 7\n" * 3)
    Routing(folders=runs[:1], text=("a.txt",), out=home / "new" / "place", device="cpu").run()
    (run,) = json.loads((home / "new" / "place" / "routing.json").read_text("utf-8"))["runs"]
    assert run["name"] == "swiglu/seed-0"
    assert run["length"] == 63 + 2 - 1  # an end of document before and behind the text, and a target at the end


def test_mistakes_are_one_line(runs: tuple[Path, Path], home: Path) -> None:
    softmax, bilinear = runs
    assert "name one or more run folders" in mistake()
    assert "a run is named twice" in mistake(softmax, softmax.parent / "seed-0")
    assert "--tokens 1: write 2 or more" in mistake(softmax, tokens=1)
    assert "not a run" in mistake(softmax, home / "corpus")
    assert "not a run" in mistake(home / "nowhere")
    few = mistake(softmax, tokens=CONTEXT - 1)
    assert few.startswith(f"{softmax}: 15 tokens to read, and the run's windows have 16")
    Path("short.txt").write_text("x" * 5)
    assert "6 tokens to read, and the run's windows have 16" in mistake(softmax, text=("short.txt",))
    assert "does not exist" in mistake(softmax, text=("missing.txt",))
    assert not (home / "routing").exists()

    config = bilinear / "config.toml"
    config.write_text(config.read_text("utf-8").replace("validation = 0.2", "validation = 0.3"))
    assert mistake(softmax, bilinear) == "the runs were trained on different text; name one text for all with --text"
    for checkpoint in softmax.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert "has no checkpoint yet" in mistake(softmax)
    with pytest.raises(CheckpointError):
        Routing(folders=(home / "corpus",)).run()


def test_text_that_is_empty_or_no_text(runs: tuple[Path, Path]) -> None:
    Path("empty.txt").write_text("")
    Path("binary.txt").write_bytes(b"\x00\x01")
    for name, words in (("empty.txt", "empty"), ("binary.txt", "binary file")):
        error = mistake(runs[0], text=(name,))
        assert name in error
        assert words in error
    with pytest.raises(DataError):
        Routing(folders=runs, text=("missing.txt",)).run()


def test_short_names() -> None:
    assert short_names([Path("runs/pair/softmax/seed-0")]) == ["softmax/seed-0"]
    assert short_names([Path("a/x/seed-0"), Path("a/y/seed-0")]) == ["x", "y"]
    assert short_names([Path("a/x/seed-0"), Path("a/y/seed-1")]) == ["x/seed-0", "y/seed-1"]
    assert short_names([Path("a/x"), Path("b")]) == ["a/x", "b"]
