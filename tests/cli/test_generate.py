"""``tensorformer generate``: several prompts, stops, Ctrl-C."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorformer.cli.generate import _print
from tensorformer.cli.main import main
from tensorformer.config.load import load_config, variant_run
from tensorformer.data.tokenizer import ByteTokenizer
from tensorformer.lab import checkpoint, record
from tensorformer.lab.generate import Piece
from tensorformer.nn.model import TensorTransformer

RUN = "runs/tiny/bilinear/seed-0"


@pytest.fixture
def run(home: Path) -> Path:
    """A run as if it had been trained: what it says is noise of printable bytes."""
    folder = home / RUN
    folder.mkdir(parents=True)
    config = variant_run(load_config(home / "tiny.toml"), "bilinear", 0)
    record.claim(folder, config, "corpus")
    ByteTokenizer().save(folder)
    checkpoint.save(folder, 1, 0.0, TensorTransformer(config.model, config.seed), [])
    return folder


def generated(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> str:
    assert main(["generate", RUN, "--device", "cpu", "--tokens", "30", *options]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


@pytest.mark.usefixtures("run")
def test_each_prompt_gets_the_text_it_gets_alone(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["line 3", "a much longer beginning of some other line", ""]
    alone = [generated(capsys, "--prompt", p) for p in prompts]
    assert all(text.startswith(p) for p, text in zip(prompts, alone, strict=True))
    together = generated(capsys, *(x for p in prompts for x in ("--prompt", p)))
    assert together == "\n".join(alone)
    assert generated(capsys) == alone[2]
    assert generated(capsys, "--seed", "1") != alone[2]


@pytest.mark.usefixtures("run")
def test_a_stop_ends_the_text_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    whole = generated(capsys, "--prompt", "x", "--temperature", "0")
    middle = whole[12:14]
    at = whole.index(middle, 1)
    stopped = generated(capsys, "--prompt", "x", "--temperature", "0", "--stop", middle, "--stop", "not in it")
    assert stopped == whole[:at] + "\n"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stop", ""], "--stop '': write at least one character"),
        (["--prompt", "\ud800"], "--prompt: is not valid UTF-8"),
        (["--prompt", "fine", "--prompt", "a\0b"], "byte 0"),
        (["--tokens", "0"], "write 1 or more"),
        (["--top-p", "2"], "top_p"),
    ],
)
def test_bad_input_is_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = generated(capsys, *options, code=1)
    assert words in error
    assert error.count("\n") == 1


def test_a_model_that_is_broken_says_so_after_the_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = record.read_run(run)
    model = TensorTransformer(config.model, config.seed)
    with torch.no_grad():
        model.embed.weight[ord("!")] = torch.nan
    checkpoint.save(run, 2, 0.0, model, [])
    assert main(["generate", RUN, "--prompt", "fine", "--prompt", "not!", "--temperature", "0", "--tokens", "3"]) == 1
    out = capsys.readouterr()
    assert out.out.startswith("fine")
    assert out.out.endswith("\n\nnot!\n")
    assert "prompt 2 ends here" in out.err


def test_texts_are_printed_in_order_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    seen: list[str] = []

    def pieces() -> Iterator[Piece]:
        for prompt, text in ((0, "a"), (1, "x"), (2, "p."), (0, "b."), (1, "y"), (1, "z.")):
            yield Piece(prompt, text, text.endswith("."))
            seen.append(screen.getvalue())

    _print(("A", "B", "C"), pieces())
    assert seen == ["Aa", "Aa", "Aa", "Aab.\n\nBx", "Aab.\n\nBxy", "Aab.\n\nBxyz.\n\nCp.\n"]


@pytest.mark.real
@pytest.mark.usefixtures("run")
def test_ctrl_c_ends_the_texts_and_says_130() -> None:
    endless = ["--tokens", "10000000", "--temperature", "0", "--prompt", "one", "--prompt", "two"]
    command = [sys.executable, "-m", "tensorformer", "generate", RUN, "--device", "cpu", *endless]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    begun = process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""
    text = begun + rest
    assert text.startswith(b"one")
    assert b"\n\ntwo" in text
    assert text.endswith(b"\n")
    text.decode()  # nothing is cut in the middle of a character
