"""The command line as a person meets it: help, mistakes in one line, exit codes, a whole small session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes import RECIPES, TINY

COMMANDS = ["compare", "train", "report", "generate", "list", "gallery", "bench"]
STUDIES = ["study numerics", "study precision", "study ranges", "study routing"]


def tensorformer(*arguments: str, code: int = 0) -> str:
    """Run a command, check its exit code, and return what it printed (on stderr, where it fails)."""
    done = subprocess.run([sys.executable, "-m", "tensorformer", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def test_help_names_every_command_and_what_to_do_first() -> None:
    text = tensorformer("--help")
    for word in (*COMMANDS, "study", "recipes/demo.toml", "--dry-run"):
        assert word in text


@pytest.mark.parametrize("command", [*COMMANDS, *STUDIES])
def test_every_command_explains_itself(command: str) -> None:
    text = tensorformer(*command.split(), "--help")
    assert "--debug" in text
    assert "None" not in text.replace("None}", "")


def test_help_is_quick_because_it_loads_no_torch() -> None:
    heavy = ("torch", "altair", "transformers")
    code = f"import sys, tensorformer.cli.main; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "tiny.tml"], "no such recipe; did you mean 'tiny.toml'?"),
        (["compare", "tiny.toml", "--jobs", "0"], "--jobs 0: write 1 or more"),
        (["compare", "tiny.toml", "--set", "train.tokns=5"], "did you mean 'tokens'?"),
        (["compare", "tiny.toml", "--device", "cuda:7"], "can't be used here"),
        (["train", "tiny.toml", "--variant", "bilinaer"], "there is no variant 'bilinaer'; did you mean 'bilinear'?"),
        (["report", "runs/tiny"], "results.json: not there"),
        (["generate", "runs/tiny"], "not a run"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_1(home: Path, arguments: list[str], words: str) -> None:
    error = tensorformer(*arguments, code=1)
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1
    assert not (home / "runs").exists()


def test_debug_shows_where_an_error_came_from(home: Path) -> None:
    assert "Traceback" in tensorformer("compare", "tiny.tml", "--debug", code=1)


@pytest.mark.parametrize(
    "arguments", [["comprae", "tiny.toml"], ["compare"], ["compare", "tiny.toml", "--job", "2"], []]
)
def test_a_wrong_command_line_exits_with_2(home: Path, arguments: list[str]) -> None:
    assert tensorformer(*arguments, code=2)


def test_a_binary_or_empty_or_missing_file_is_one_line(home: Path) -> None:
    for name, content in (("empty.txt", b""), ("binary.txt", b"\x00\x01\xff" * 100)):
        (home / name).write_bytes(content)
        error = tensorformer("train", "tiny.toml", "--set", f'data.source=["{name}"]', code=1)
        assert name in error
        assert error.count("\n") == 1
    error = tensorformer("train", "tiny.toml", "--set", 'data.source=["missing.txt"]', code=1)
    assert "missing.txt" in error
    assert error.count("\n") == 1


def test_a_plan_tells_active_parameters_of_mixtures(home: Path) -> None:
    mixture = '{ kind = "moe", n_experts = 4, router = { top_k = 2 }, routed = { gate = "bilinear", d_ff = 12 } }'
    plan = tensorformer(
        "compare", "tiny.toml", "--dry-run", "--set", f"model.ffns.bilinear={mixture}", "--set", "compare.match=none"
    )
    assert "active" in plan


def test_a_whole_session(home: Path) -> None:
    plan = tensorformer("compare", "tiny.toml", "--dry-run")
    assert "bilinear" in plan
    assert "active" not in plan
    assert "4 runs of 2,560 tokens" in plan
    assert not (home / "runs").exists()

    out = tensorformer("train", "tiny.toml", "--variant", "bilinear")
    assert "nats a token" in out
    out = tensorformer("compare", "tiny.toml")
    page = home / "runs" / "tiny" / "report.html"
    assert str(page.relative_to(home)) in out
    assert page.is_file()
    listed = tensorformer("list", "runs")
    assert listed.count("20 of 20") == 4

    page.unlink()
    tensorformer("report", "runs/tiny")
    assert page.is_file()

    run = "runs/tiny/bilinear/seed-0"
    first = tensorformer("generate", run, "--prompt", "line é", "--tokens", "50", "--seed", "3")
    assert first.startswith("line é")
    assert first == tensorformer("generate", run, "--prompt", "line é", "--tokens", "50", "--seed", "3")
    assert first != tensorformer("generate", run, "--prompt", "line é", "--tokens", "50", "--seed", "4")
    for bad in (["--temperature", "-1"], ["--top-p", "0"], ["--tokens", "0"]):
        assert "write" in tensorformer("generate", run, *bad, code=1)


def test_list_shows_what_a_recipe_may_name() -> None:
    assert "swiglu" in tensorformer("list")
    assert "gelu_tanh" in tensorformer("list", "activations")
    assert "bilinear_norm" in tensorformer("list", "attention")


def test_a_reader_that_leaves_early_is_no_error(home: Path) -> None:
    command = f"{sys.executable} -m tensorformer list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ})
    assert done.stderr == ""


def test_names_in_a_recipe_can_not_leave_the_runs_folder(home: Path) -> None:
    (home / "tiny.toml").write_text(TINY.replace("[variants.bilinear]", '[variants."../../x"]'))
    assert "matching regex" in tensorformer("compare", "tiny.toml", code=1)


def test_the_demo_recipe_is_within_its_limits() -> None:
    from tensorformer.config.load import load_config
    from tensorformer.lab.plan import plan

    recipe = load_config(RECIPES / "demo.toml")
    assert recipe.compare is not None
    assert len(recipe.compare.seeds) == 3
    assert recipe.train.context == 256
    assert round(recipe.train.tokens / 1e6, 1) == 0.4  # about 0.4 M: as many as ten minutes on two cores allow
    for p in plan(recipe):
        assert p.n_params <= 850_000
        assert abs(p.remainder) <= 0.005
