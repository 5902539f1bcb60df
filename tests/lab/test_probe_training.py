"""Runs on probes: only answers count, they are learnt, resumed bit for bit, and compared like runs on text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorformer.config.load import load_config, variant_run
from tensorformer.config.schema import Run
from tensorformer.data.examples import held_out, open_examples, training_batches
from tensorformer.data.probes import GeneratedProbe
from tensorformer.errors import CheckpointError, ConfigError
from tensorformer.lab import evaluate, record
from tensorformer.lab.compare import compare
from tensorformer.lab.optim import make_optimizers
from tensorformer.lab.plan import plan
from tensorformer.lab.train import Interrupted, train, training_step
from tensorformer.nn.model import TensorTransformer
from tests.data.probe_recipe import EACH, INDUCTION, RECALL, tiny_probe
from tests.lab.test_train import same_bits

CPU = torch.device("cpu")
UNSCORED = -100


def tiny(probe: str = RECALL, variant: str = "softmax", **train_changes: object) -> Run:
    Path("probe.toml").write_text(tiny_probe(probe))
    run = variant_run(load_config("probe.toml"), variant, seed=0)
    return msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, **train_changes))


def run_it(run: Run, folder: Path, **options: object) -> record.Result:
    return train(run, folder, open_examples(run.data), CPU, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", EACH)
def test_a_run_leaves_losses_and_accuracies_of_its_answers(home: Path, kind: str) -> None:
    run = tiny(EACH[kind])
    result = run_it(run, home / "r", contexts=(1, 2, 4), tuning=True)
    assert result.bits_per_byte is None
    assert result.tuning_loss is not None
    assert set(result.context_losses) == set(result.context_accuracies) == {16, 32, 64}
    assert result.loss == result.context_losses[16]
    assert all(0 <= accuracy <= 1 for accuracy in result.context_accuracies.values())
    points = record.seed_result(home / "r", 0).curve
    assert [p.step for p in points] == [5, 10, 15, 20]
    assert all(p.accuracy is not None for p in points)
    assert not (home / "r" / "tokenizer_kind.json").exists()
    assert record.read_run(home / "r") == run
    assert run_it(run, home / "r", contexts=(1, 2, 4), tuning=True) == result  # finished: nothing to do


def test_a_probe_is_learnt(home: Path) -> None:
    """A transformer of two layers learns what followed a symbol before; one guess in eight is right by chance."""
    run = tiny('kind = "induction"\nshortest = 2\nlongest = 6\nsymbols = 8', tokens=200 * 512, batch_size=32)
    result = run_it(run, home / "r")
    assert result.context_accuracies[16] > 0.7


@pytest.mark.parametrize("kind", EACH)
def test_an_interrupted_run_ends_with_the_same_bits(home: Path, kind: str) -> None:
    run = tiny(EACH[kind], "linear")
    run_it(run, home / "whole")
    for more in (1, 6):
        asked = iter([False] * (more - 1) + [True])
        with pytest.raises(Interrupted):
            run_it(run, home / "cut", should_stop=lambda asked=asked: next(asked))
    run_it(run, home / "cut")
    same_bits(home / "whole", home / "cut")


def test_the_bit_check_catches_a_probe_that_starts_over_on_resuming(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny()
    run_it(run, home / "whole")
    with pytest.raises(Interrupted):
        run_it(run, home / "cut", should_stop=lambda: True)
    batch = GeneratedProbe.batch
    monkeypatch.setattr(GeneratedProbe, "batch", lambda self, step, *rest: batch(self, step - 1, *rest))
    run_it(run, home / "cut")
    with pytest.raises(AssertionError):
        same_bits(home / "whole", home / "cut")


def gradients(run: Run, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Return what a training step makes of a batch: its loss, and the gradients before they are used up."""
    model = TensorTransformer(run.model, run.seed)
    found: dict[str, torch.Tensor] = {}
    optimizer = make_optimizers(model, run.train.optimizer)[0]

    def keep(*_: object) -> None:
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    loss, *_ = training_step(model, [optimizer], inputs, targets, run.train)
    return loss, found


def by_hand(run: Run, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of the answers, taken out one by one, and its gradients."""
    model = TensorTransformer(run.model, run.seed)
    logits = model(inputs)
    answers = [
        -F.log_softmax(logits[b, t], dim=-1)[targets[b, t]]
        for b in range(len(inputs))
        for t in range(inputs.shape[1])
        if targets[b, t] != UNSCORED
    ]
    loss = torch.stack(answers).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [None, 1, 2, 4])
def test_the_loss_is_the_mean_over_answers_however_a_batch_is_cut(home: Path, micro: int | None) -> None:
    """Rows of the induction probe hold unlike numbers of answers: a mean of the parts' means would be another loss."""
    run = tiny(INDUCTION, grad_clip=None, micro_batch_size=micro)
    inputs, targets = training_batches(open_examples(run.data), 16, 8, 0)(3)
    counts = (targets != UNSCORED).sum(dim=1)
    assert len(set(counts.tolist())) > 2
    loss, found = gradients(run, inputs, targets)
    wanted_loss, wanted = by_hand(run, inputs, targets)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    means, _ = zip(*(by_hand(run, inputs[b : b + 1], targets[b : b + 1]) for b in range(8)), strict=True)
    assert sum(means) / 8 != pytest.approx(wanted_loss, rel=1e-3)  # what the test is there to catch


def test_a_part_of_a_batch_without_answers_adds_nothing(home: Path) -> None:
    run = tiny(micro_batch_size=4, grad_clip=None)
    inputs, targets = training_batches(open_examples(run.data), 16, 8, 0)(0)
    none = targets.clone()
    none[:4] = UNSCORED
    loss, found = gradients(run, inputs, none)
    wanted, alone = by_hand(run, inputs[4:], targets[4:])
    assert loss == pytest.approx(wanted, rel=1e-5)
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


class Oracle(nn.Module):
    """Answers with the probe's own solver, but for every ``wrong``-th row, which it gets wrong throughout."""

    def __init__(self, probe: GeneratedProbe, wrong: int) -> None:
        super().__init__()
        self.probe, self.wrong = probe, wrong
        self.scale = nn.Parameter(torch.tensor(40.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        known = torch.tensor([self.probe.task.solve(row) for row in tokens.tolist()]).clamp(min=0)
        known[:: self.wrong] = (known[:: self.wrong] + 1) % self.probe.vocab_size
        return F.one_hot(known, self.probe.vocab_size) * self.scale


@pytest.mark.parametrize("kind", EACH)
def test_the_score_of_one_who_knows_is_perfect_and_one_wrong_row_shows(home: Path, kind: str) -> None:
    run = tiny(EACH[kind])
    probe = open_examples(run.data)
    assert isinstance(probe, GeneratedProbe)
    windows = list(held_out(probe, "validation", 16, 1600))
    perfect = evaluate.score(Oracle(probe, wrong=1_000_000).train(), windows, "float32")
    some = evaluate.score(Oracle(probe, wrong=10), windows, "float32")
    answers = (windows[0][1] != UNSCORED).sum(dim=1)
    # Row 0 is among the wrong of both.
    assert perfect.accuracy == pytest.approx(1 - int(answers[0]) / int(answers.sum()))
    assert some.accuracy == pytest.approx(1 - int(answers[::10].sum()) / int(answers.sum()))
    assert some.loss == pytest.approx(40 * (1 - some.accuracy), rel=1e-5)


def test_text_has_no_accuracy(home: Path) -> None:
    run = variant_run(load_config("tiny.toml"), "swiglu", seed=0)
    result = run_it(run, home / "r")
    assert result.context_accuracies == {}
    assert result.bits_per_byte is not None
    assert "accuracy" not in (home / "r" / "metrics.jsonl").read_text()


def test_another_probe_in_a_folder_is_refused(home: Path) -> None:
    run_it(tiny(), home / "r")
    with pytest.raises(CheckpointError, match=r"another configuration \(data\.probe\.values: 8 → 7\)"):
        run_it(tiny(RECALL.replace("values = 8", "values = 7")), home / "r")


def test_a_comparison_on_a_probe_has_accuracies_and_what_could_be_known(home: Path) -> None:
    Path("probe.toml").write_text(tiny_probe())
    recipe = load_config("probe.toml", ["compare.seeds=[1]"])
    results = compare(recipe, plan(recipe), Path("runs"), "cpu", 2)
    assert results.corpus is None
    assert results.probe is not None
    assert results.probe.name == "multi-query associative recall"
    assert results.probe.perfect == {16: 1.0, 32: 1.0, 64: 1.0}
    assert results.probe.answers == {16: 64 * 3, 32: 32 * 3, 64: 16 * 3}
    assert results.probe.chance == 1 / 8
    for v in results.variants:
        assert v.bits_per_byte is None
        assert set(v.context_accuracies) == {16, 32, 64}
        assert v.context_accuracies[16].mean == v.seeds[0].context_accuracies[16]
        assert v.seeds[0].curve[-1].accuracy is not None
    assert results.variants[1].difference is not None
    inputs = [training_batches(open_examples(p.run.data), 16, 8, p.at_seed(1).seed)(3)[0] for p in plan(recipe)]
    assert inputs[0].equal(inputs[1])


@pytest.mark.slow
def test_the_command_line_takes_a_probe_as_it_takes_text(home: Path) -> None:
    Path("probe.toml").write_text(tiny_probe())

    def tensorformer(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "tensorformer", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    said = tensorformer("compare", "probe.toml", "--device", "cpu", "--jobs", "1", "--dry-run")
    assert "probe multi-query associative recall: 3 pairs of 8 keys and 8 values" in said
    assert not (home / "runs").exists()
    said = tensorformer("train", "probe.toml", "--device", "cpu", "--variant", "softmax")
    assert "nats an answer" in said
    assert "% of the answers right" in said
    assert "20 of 20" in tensorformer("list", "runs")
    error = tensorformer("generate", "runs/tiny-probe/softmax/seed-0", "--device", "cpu", code=1)
    assert "a run on a probe, which has no text" in error
    assert error.count("\n") == 1
    assert not (home / "cache").exists()  # no text was looked for
    with pytest.raises(ConfigError, match="a probe is generated"):
        load_config("probe.toml", ['data.source="x.txt"'])
