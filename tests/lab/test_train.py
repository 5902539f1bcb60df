"""A run: it learns, resumes bit for bit however it was stopped, and says where it broke."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from tensorformer.config.load import load_config, variant_run
from tensorformer.config.schema import AdamW, Cosine, Muon, Run, WarmupStableDecay
from tensorformer.errors import CheckpointError, DivergenceError
from tensorformer.files import sha256
from tensorformer.lab import checkpoint, record
from tensorformer.lab.optim import decay_start, make_optimizers, n_steps, rate
from tensorformer.lab.train import Interrupted, Progress
from tensorformer.nn.model import TensorTransformer
from tests.lab.runs import run_it, same_bits


def tiny(variant: str = "bilinear", seed: int = 0, **train_changes: object) -> Run:
    run = variant_run(load_config("tiny.toml"), variant, seed)
    return msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, **train_changes))


def test_it_learns_and_leaves_what_it_promises(home: Path) -> None:
    run = tiny(tokens=12_800)
    seen: list[Progress] = []
    result = run_it(run, home / "r", contexts=(1, 2), on_progress=seen.append)
    rows = list(record.read_rows(home / "r" / "metrics.jsonl"))
    losses = [r["loss"] for r in rows if "loss" in r]
    assert len(losses) == n_steps(run.train) == seen[-1].step
    assert losses[0] == pytest.approx(6.05, abs=0.25)  # ln 256 + ½: the first logits are unit noise
    assert losses[-1] < losses[0] - 1.5
    assert [r["step"] for r in rows if "validation_loss" in r][-1] == 100
    assert result.loss == result.context_losses[16]
    assert set(result.context_losses) == {16, 32}
    assert result.bits_per_byte == pytest.approx(result.loss / 0.6931, rel=0.01)
    assert record.read_run(home / "r") == run
    assert run_it(run, home / "r", contexts=(1, 2)) == result  # finished: nothing to do


def test_further_contexts_are_measured_without_training_again(home: Path) -> None:
    first = run_it(tiny(), home / "r")
    before = sha256(home / "r" / "metrics.jsonl")
    again = run_it(tiny(), home / "r", contexts=(1, 2, 4))
    assert set(again.context_losses) == {16, 32, 64}
    assert again.loss == pytest.approx(first.loss, abs=0.1)  # on other windows of the same text
    assert sha256(home / "r" / "metrics.jsonl") == before


OPTIMIZERS = {
    "adamw": {"optimizer": AdamW(lr=1e-2)},
    "muon": {"optimizer": Muon(lr=1e-2)},
    "accumulated": {"micro_batch_size": 2, "schedule": WarmupStableDecay(warmup_steps=2)},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_interrupted_run_ends_with_the_same_bits(home: Path, kind: str) -> None:
    run = tiny(**OPTIMIZERS[kind])
    run_it(run, home / "whole")
    for more in (1, 6, 5):  # off and on the steps at which checkpoints are due
        asked = iter([False] * (more - 1) + [True])
        with pytest.raises(Interrupted):
            run_it(run, home / "cut", should_stop=lambda asked=asked: next(asked))
    run_it(run, home / "cut")
    same_bits(home / "whole", home / "cut")


def test_the_bit_check_catches_a_resume_that_forgets_the_moments(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_it(tiny(), home / "whole")
    with pytest.raises(Interrupted):
        run_it(tiny(), home / "cut", should_stop=lambda: True)
    monkeypatch.setattr(checkpoint, "_restore_optimizers", lambda *_: None)
    run_it(tiny(), home / "cut")
    with pytest.raises(AssertionError):
        same_bits(home / "whole", home / "cut")


KILLED = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tensorformer.config.load import load_config, variant_run
from tensorformer.data.prepare import prepare
from tensorformer.lab.train import train
run = variant_run(load_config("tiny.toml", ["train.tokens=12800"]), "bilinear", 0)
train(run, Path("cut"), prepare(run.data), torch.device("cpu"), on_progress=lambda p: print(p.step, flush=True))
"""


def test_a_run_killed_at_random_steps_ends_with_the_same_bits(home: Path) -> None:
    run = tiny(tokens=12_800)
    run_it(run, home / "whole")
    draws = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(draws.randrange(2, 30)):
            process.stdout.readline()
        time.sleep(draws.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    subprocess.run([sys.executable, "-c", KILLED], check=True, stdout=subprocess.DEVNULL)
    same_bits(home / "whole", home / "cut")


def test_a_row_cut_short_by_a_kill_is_dropped(home: Path) -> None:
    run_it(tiny(), home / "whole")
    with pytest.raises(Interrupted):
        run_it(tiny(), home / "cut", should_stop=lambda: True)
    with (home / "cut" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 2, "loss": 3.1}\n{"step": 3, "lo')
    run_it(tiny(), home / "cut")
    same_bits(home / "whole", home / "cut")


@pytest.mark.parametrize("decay", [0.2, 0.5])
def test_a_longer_run_that_branches_off_equals_one_from_scratch(home: Path, decay: float) -> None:
    schedule = WarmupStableDecay(warmup_steps=2, decay=decay)
    run_it(tiny(schedule=schedule), home / "short")
    long = tiny(schedule=schedule, tokens=5120)
    run_it(long, home / "scratch")
    began: list[Progress] = []
    run_it(long, home / "branch", branch_from=home / "short", on_progress=began.append)
    assert began[0].step == decay_start(tiny(schedule=schedule).train) + 1
    same_bits(home / "scratch", home / "branch")


def test_another_run_is_no_trunk(home: Path) -> None:
    schedule = WarmupStableDecay(warmup_steps=2)
    run_it(tiny(schedule=schedule), home / "short")
    with pytest.raises(CheckpointError, match="is no trunk"):
        run_it(tiny(schedule=schedule, tokens=5120, grad_clip=0.5), home / "b", branch_from=home / "short")


def test_accumulation_changes_no_gradient(home: Path) -> None:
    whole, parts = tiny(), tiny(micro_batch_size=2)
    run_it(whole, home / "a")
    run_it(parts, home / "b")
    a, b = (list(record.read_rows(home / f / "metrics.jsonl")) for f in "ab")
    for x, y in zip(a[:6], b[:6], strict=True):
        if "loss" in x:
            assert x["loss"] == pytest.approx(y["loss"], rel=1e-4)
            assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("variant", ["bilinear", "swiglu"])
def test_a_loss_that_is_not_finite_names_step_layer_and_checkpoint(home: Path, variant: str) -> None:
    run = tiny(variant, tokens=12_800, optimizer=AdamW(lr=1e30), grad_clip=None, schedule=Cosine(warmup_steps=0))
    with pytest.raises(
        DivergenceError, match=r"step \d+: the (loss|gradient) is (nan|inf), first in the (gradient|output) of \S+;"
    ):
        run_it(run, home / "r")
    rows = list(record.read_rows(home / "r" / "metrics.jsonl"))
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in rows if "loss" in r)


def test_a_divergence_names_the_last_good_checkpoint(home: Path) -> None:
    with pytest.raises(Interrupted):
        run_it(tiny(), home / "r", should_stop=lambda: True)
    weights = home / "r" / "checkpoint-1" / checkpoint.MODEL
    model = TensorTransformer(tiny().model)
    checkpoint.load(home / "r" / "checkpoint-1", model)
    optimizers = make_optimizers(model, tiny().train.optimizer)
    with torch.no_grad():
        model.get_parameter("layers.1.ffn.up_proj.weight")[0, 0] = float("nan")
    checkpoint.save(home / "r", 1, 0.0, model, optimizers)
    with pytest.raises(
        DivergenceError, match=r"step 2: .*first in the output of layers\.1\.ffn\.up_proj; .*checkpoint-1;"
    ):
        run_it(tiny(), home / "r")
    assert weights.exists()


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZERS])
def test_a_flipped_byte_is_found_and_nothing_is_overwritten(home: Path, name: str) -> None:
    with pytest.raises(Interrupted):
        run_it(tiny(), home / "r", should_stop=lambda: True)
    file = home / "r" / "checkpoint-1" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}: damaged .*remove .*checkpoint-1 to go on without it"):
        run_it(tiny(), home / "r")
    assert file.read_bytes() == bytes(content)
    shutil.rmtree(file.parent)
    run_it(tiny(), home / "r")  # the mend that the message names


def test_another_configuration_or_corpus_in_a_folder_is_refused(home: Path) -> None:
    run_it(tiny(), home / "r")
    before = {p: p.read_bytes() for p in (home / "r").rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"another configuration \(train\.tokens: 2560 → 5120\)"):
        run_it(tiny(tokens=5120), home / "r")
    (home / "corpus" / "000.txt").write_text("other words")
    with pytest.raises(CheckpointError, match="other text"):
        run_it(tiny(), home / "r")
    assert {p: p.read_bytes() for p in (home / "r").rglob("*") if p.is_file()} == before


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted):
        run_it(tiny(), home / "r", should_stop=lambda: True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"can't be written .*No space left.*free some space"):
        run_it(tiny(), home / "r")
    assert [p.name for p in (home / "r").glob("*checkpoint*")] == ["checkpoint-1"]
    monkeypatch.undo()
    os.environ["TENSORFORMER_CACHE"] = str(home / "cache")
    os.chdir(home)
    run_it(tiny(), home / "r")


def test_only_the_last_checkpoints_and_the_trunk_are_kept(home: Path) -> None:
    run = tiny(schedule=WarmupStableDecay(warmup_steps=2, decay=0.5), tokens=5120)
    run_it(run, home / "r")
    assert sorted(p.name for p in (home / "r").glob("*checkpoint*")) == ["checkpoint-20", "checkpoint-40"]


def test_schedules() -> None:
    cosine = msgspec.structs.replace(_train(), schedule=Cosine(warmup_steps=10, final=0.1))
    rates = [rate(s, cosine) for s in range(n_steps(cosine))]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1
    assert rates[55] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    wsd = msgspec.structs.replace(_train(), schedule=WarmupStableDecay(warmup_steps=10, decay=0.25))
    rates = [rate(s, wsd) for s in range(100)]
    assert set(rates[10:75]) == {1.0}
    assert rates[75:] == pytest.approx([1 - i / 25 for i in range(25)])


def _train():
    from tensorformer.config.schema import Train

    return Train(tokens=100 * 64, context=16, batch_size=4, optimizer=AdamW(lr=1), schedule=Cosine(warmup_steps=1))


def test_every_parameter_is_held_by_one_optimizer_and_muon_takes_hidden_matrices(home: Path) -> None:
    model = TensorTransformer(tiny().model)
    names = {p: n for n, p in model.named_parameters()}
    for config in (AdamW(lr=1e-3), Muon(lr=1e-3)):
        held = [names[p] for o in make_optimizers(model, config) for g in o.param_groups for p in g["params"]]
        assert sorted(held) == sorted(names.values())
    muon, adamw = make_optimizers(model, Muon(lr=1e-3))
    assert all("_proj" in names[p] for g in muon.param_groups for p in g["params"])
    assert {names[p] for g in adamw.param_groups for p in g["params"]} >= {"embed.weight", "head.weight", "norm.weight"}
    for group in adamw.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])


def test_metrics_are_json_lines(home: Path) -> None:
    run_it(tiny(), home / "r")
    for line in (home / "r" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] >= 1


COMPILED = """
import torch
torch.set_num_threads(1)
from pathlib import Path
from tensorformer.config.load import load_config, variant_run
from tensorformer.data.prepare import prepare
from tensorformer.lab.train import train
changes = [["train.compile=true"], ["train.compile=false"]]
for i, overrides in enumerate(changes):
    run = variant_run(load_config("tiny.toml", ["train.tokens=1280", *overrides]), "bilinear", 0)
    print(train(run, Path(f"run{i}"), prepare(run.data), torch.device("cpu")).loss)
"""


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(home: Path) -> None:
    # A cache of its own: graphs kept there by another version of the operators are no part of this test.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compiled, eager = map(float, done.stdout.split())
    assert compiled == pytest.approx(eager, abs=2e-3)
