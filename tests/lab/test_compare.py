"""A comparison from recipe to results: trained once, added to, stopped and gone on with, refused where it must be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tensorformer.config.load import load_config
from tensorformer.errors import CheckpointError, ConfigError, DivergenceError, TensorformerError
from tensorformer.files import sha256
from tensorformer.lab.compare import Watcher, compare, read_results
from tensorformer.lab.plan import plan, plan_one
from tensorformer.lab.pool import Event, Task
from tensorformer.lab.results import Comparison
from tests.recipes import TINY


def run(text: str = TINY) -> tuple[Comparison, list[str]]:
    """Compare, and return the results and the labels of the runs that were trained."""
    Path("tiny.toml").write_text(text)
    trained: list[str] = []

    def tasks(batch: list[Task]) -> None:
        trained.extend(t.label for t in batch)

    recipe = load_config("tiny.toml")
    return compare(recipe, plan(recipe), Path("runs"), "cpu", 2, Watcher(on_tasks=tasks)), trained


def test_a_comparison_is_trained_once_and_added_to(home: Path) -> None:
    first, trained = run()
    assert trained == ["swiglu/seed-0", "bilinear/seed-0", "swiglu/seed-1", "bilinear/seed-1"]
    assert read_results(home / "runs" / "tiny") == first
    assert [v.name for v in first.variants] == ["swiglu", "bilinear"]
    baseline, bilinear = first.variants
    assert baseline.difference is None
    assert bilinear.difference is not None
    losses = [{s.seed: s.loss for s in v.seeds} for v in first.variants]
    assert bilinear.difference.per_seed == {s: losses[1][s] - losses[0][s] for s in (0, 1)}
    assert abs(bilinear.remainder) <= 0.02
    assert set(bilinear.context_losses) == {16, 32, 64}
    assert bilinear.tokens_per_second == pytest.approx(128 / bilinear.step_seconds)
    assert bilinear.seeds[0].curve[-1].step == 20
    assert 50_000 < baseline.peak_memory < 20_000_000  # 14k float32 weights thrice, and activations
    assert 0.2 < bilinear.peak_memory / baseline.peak_memory < 5
    assert any("remainder" in n for n in first.notes)

    again, trained = run()
    assert trained == []
    assert msgspec.structs.replace(again, created="") == msgspec.structs.replace(first, created="")

    more = TINY.replace("seeds = [0, 1]", "seeds = [0, 1, 2]")
    more += """
[variants.third]
model.layers = [{ mixer = "normed", ffn = "swiglu" }]
[model.mixers.normed]
kind = "softmax_attention"
n_heads = 2
qk_norm = true
"""
    grown, trained = run(more)
    assert sorted(trained) == ["bilinear/seed-2", "swiglu/seed-2", "third/seed-0", "third/seed-1", "third/seed-2"]
    assert grown.variants[1].seeds[:2] == bilinear.seeds


def test_every_variant_sees_the_same_tokens(home: Path) -> None:
    from tensorformer.data.batches import Batches
    from tensorformer.data.prepare import prepare

    recipe = load_config("tiny.toml")
    tokens = prepare(recipe.data).train.tokens
    batches = [
        Batches(tokens, p.run.train.context, p.run.train.batch_size, p.at_seed(1).seed).batch(3)[0]
        for p in plan(recipe)
    ]
    assert batches[0].equal(batches[1])


def test_data_to_match_trains_the_baseline_at_three_budgets_off_one_trunk(home: Path) -> None:
    text = TINY.replace('{ kind = "cosine"', '{ kind = "wsd"').replace(
        "delta = 0.05", "delta = 0.05\ndata_to_match = true"
    )
    results, trained = run(text)
    assert "swiglu/tokens-1280/seed-0" in trained
    assert "swiglu/tokens-5120/seed-1" in trained
    assert not any(label.startswith("bilinear/tokens") for label in trained)
    assert set(results.baseline_curve) == {1280, 2560, 5120}
    bilinear = results.variants[1]
    assert bilinear.data_to_match is not None
    assert bilinear.time_to_match is not None
    slower = bilinear.step_seconds / results.variants[0].step_seconds
    assert bilinear.time_to_match.value == pytest.approx(bilinear.data_to_match.value * slower)
    short, long = (home / f"runs/tiny/swiglu/{f}seed-0/metrics.jsonl" for f in ("tokens-1280/", "tokens-5120/"))
    shared = 8  # steps before the shortest run decays
    assert short.read_text().splitlines()[:shared] == long.read_text().splitlines()[:shared]


def test_a_learning_rate_is_chosen_for_each_variant_on_the_tuning_part(home: Path) -> None:
    text = TINY.replace("delta = 0.05", "delta = 0.05\nlearning_rates = [1e-5, 1e-2, 1e30]")
    text = text.replace("warmup_steps = 2", "warmup_steps = 0")
    results, _ = run(text)
    for v in results.variants:
        assert v.learning_rate == 0.01
        assert set(v.learning_rate_losses) == {"1e-05", "0.01"}  # the third diverged, and says nothing
        assert v.learning_rate_losses["0.01"] < v.learning_rate_losses["1e-05"]
    assert any("tuning part" in n for n in results.notes)
    again, trained = run(text)
    assert trained == []  # not even the one that diverged
    assert again.variants == results.variants


def test_a_run_that_diverges_is_named_and_the_others_are_kept(home: Path) -> None:
    text = TINY + "[variants.wild]\ntrain.optimizer.lr = 1e30\ntrain.schedule.warmup_steps = 0\n"
    with pytest.raises(DivergenceError, match=r"wild.seed-\d: step .*\(and 1 more\)"):
        run(text)
    results, trained = run()
    assert trained == []
    assert len(results.variants) == 2


def test_a_folder_of_another_recipe_is_refused_before_anything_is_trained(home: Path) -> None:
    run()
    before = {p: sha256(p) for p in (home / "runs").rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"another configuration \(train\.optimizer\.lr: 0\.01 → 0\.02\)"):
        run(TINY.replace("lr = 1e-2", "lr = 2e-2"))
    assert {p: sha256(p) for p in (home / "runs").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context = 16", "context = 3200", r"4 × train\.context = 12,800 tokens do not fit into the validation part"),
        (
            'preset = "bilinear"\nn_heads = 2',
            'preset = "bilinear"\nn_heads = 2\nhead_dim = 512',
            "can't be|comes within",
        ),
        (
            "d_model = 16",
            "d_model = 16\nvocab_size = 100",
            r"vocab_size: 100 .in swiglu. is less than the tokenizer's; write 256",
        ),
        ("[compare]\n", "[compare]\nmultiple_of = 64\n", "multiple of 64 comes within"),
    ],
)
def test_what_can_not_be_compared_is_refused(home: Path, old: str, new: str, message: str) -> None:
    assert old in TINY
    with pytest.raises(Exception, match=message) as e:
        run(
            TINY.replace(old, new)
            .replace("tokens = 2560", "tokens = 256_000")
            .replace("warmup_steps = 2", "warmup_steps = 1")
        )
    assert type(e.value).__name__ in ("ConfigError", "DataError")


def test_a_refused_folder_claims_no_other(home: Path) -> None:
    run()
    with pytest.raises(CheckpointError):
        run(TINY.replace("lr = 1e-2", "lr = 2e-2").replace("seeds = [0, 1]", "seeds = [5, 0, 1]"))
    results, trained = run(TINY.replace("seeds = [0, 1]", "seeds = [5, 0, 1]"))
    assert sorted(trained) == ["bilinear/seed-5", "swiglu/seed-5"]
    assert len(results.variants[0].seeds) == 3


def test_a_run_that_diverged_before_its_first_checkpoint_may_be_tried_at_another_rate(home: Path) -> None:
    wild = TINY + "[variants.wild]\ntrain.optimizer.lr = LR\ntrain.schedule.warmup_steps = 0\n"
    with pytest.raises(DivergenceError):
        run(wild.replace("LR", "1e30"))
    results, _ = run(wild.replace("LR", "1e-3"))
    assert len(results.variants) == 3


def test_budgets_that_do_not_outlast_the_warm_up_are_refused(home: Path) -> None:
    text = TINY.replace("warmup_steps = 2", "warmup_steps = 12").replace(
        "delta = 0.05", "delta = 0.05\ndata_to_match = true"
    )
    with pytest.raises(ConfigError, match="warmup_steps: 12 of 10 steps"):
        run(text)
    assert not list((home / "runs").rglob("metrics.jsonl"))


def test_a_folder_that_can_not_be_written_is_one_line(home: Path) -> None:
    (home / "runs").write_text("a file, not a folder")
    with pytest.raises(TensorformerError, match=r"runs.tiny.* can't be written .*choose another folder"):
        run()


def test_a_single_variant_is_planned_as_the_comparison_would(home: Path) -> None:
    recipe = load_config("tiny.toml")
    assert plan_one(recipe, "bilinear") == plan(recipe)[1]
    assert plan_one(recipe, None).name == "base"
    with pytest.raises(ConfigError, match="did you mean 'bilinear'"):
        plan_one(recipe, "bilinaer")


COMMAND = [sys.executable, "-m", "tensorformer", "compare", "tiny.toml", "--device", "cpu", "--jobs", "2"]


def metrics_of(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): sha256(p) for p in root.rglob("metrics.jsonl")}


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    while not condition():  # pyright: ignore
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_comparison_goes_on_and_ends_the_same(home: Path, how: signal.Signals) -> None:
    text = TINY.replace("tokens = 2560", "tokens = 51_200")
    (home / "tiny.toml").write_text(text)
    subprocess.run([*COMMAND, "--runs", "whole"], check=True, capture_output=True)

    process = subprocess.Popen(
        [*COMMAND, "--runs", "cut"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: any(p.stat().st_size > 2000 for p in (home / "cut").glob("tiny/*/seed-*/metrics.jsonl")), process)
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "run the same command to go on" in err
        assert "Traceback" not in err
        assert list((home / "cut").rglob("checkpoint-*"))
    else:
        os.kill(process.pid, how)  # the runs lose their parent, and must not write on beside the next one's
        process.communicate()
    subprocess.run([*COMMAND, "--runs", "cut"], check=True, capture_output=True)
    assert metrics_of(home / "cut") == metrics_of(home / "whole")


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_the_rest_goes_on(home: Path) -> None:
    (home / "tiny.toml").write_text(TINY.replace("tokens = 2560", "tokens = 51_200"))
    killed: list[str] = []

    def kill_one(event: Event) -> None:
        if event.kind == "progress" and not killed:
            killed.append(event.label)
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            spawned = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
            os.kill(spawned[0], signal.SIGKILL)

    recipe = load_config("tiny.toml")
    with pytest.raises(Exception, match=r"killed by signal 9 \(SIGKILL\); out of memory\? lower --jobs"):
        compare(recipe, plan(recipe), Path("runs"), "cpu", 2, Watcher(on_event=kill_one))
    results = compare(recipe, plan(recipe), Path("runs"), "cpu", 2)
    assert len(results.variants) == 2
