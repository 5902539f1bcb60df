"""Training with mixtures of experts: what is learnt, counted, balanced and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

from tensorformer.config.load import load_config, variant_run
from tensorformer.config.schema import (
    AdamW,
    Balance,
    Cosine,
    Experts,
    Layer,
    Learned,
    Model,
    MoE,
    Muon,
    Router,
    Run,
    SoftmaxAttention,
    Train,
)
from tensorformer.errors import CheckpointError, DivergenceError
from tensorformer.lab import checkpoint, evaluate, record
from tensorformer.lab import train as training
from tensorformer.lab.experts import expert_statistics
from tensorformer.lab.optim import make_optimizers
from tensorformer.lab.results import ExpertLayer
from tensorformer.lab.train import Interrupted, training_step
from tensorformer.nn.model import TensorTransformer
from tests.lab.runs import run_it, same_bits
from tests.recipes import TINY, write_tiny

MIXTURE = """
[model.ffns.moe]
kind = "moe"
n_experts = 6
routed = { gate = "bilinear", d_ff = 8 }
shared = { gate = "swiglu", d_ff = 12 }
router = { top_k = 2 }
balance = { bias_update_speed = 1e-2, aux_loss_coef = 1e-2, z_loss_coef = 1e-3 }
"""
WITH_MOE = TINY.replace("[model.ffns.bilinear]", MIXTURE + "\n[model.ffns.bilinear]").replace(
    'layers = [{ mixer = "softmax", ffn = "swiglu" }]',
    'layers = [{ mixer = "softmax", ffn = "swiglu" }, { mixer = "softmax", ffn = "moe" }]',
)


@pytest.fixture
def moe_home(home: Path) -> Path:
    """Work where ``tiny.toml`` has a dense layer, and a mixture of experts above it."""
    write_tiny(home, WITH_MOE)
    return home


def tiny(**train_changes: object) -> Run:
    run = variant_run(load_config("tiny.toml"), "swiglu", 0)
    return msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, **train_changes))


def trained(run: Run, folder: Path) -> TensorTransformer:
    last, model = checkpoint.latest(folder), TensorTransformer(run.model)
    assert last is not None
    checkpoint.load(last, model)
    return model


def test_it_learns_and_writes_what_its_experts_do(moe_home: Path) -> None:
    run = tiny(tokens=7_680, evaluate_every=15)
    run_it(run, moe_home / "r")
    rows = list(record.read_rows(moe_home / "r" / "metrics.jsonl"))
    losses = [r["loss"] for r in rows if "loss" in r]
    assert losses[-1] < losses[0] - 1.2
    steps = [r for r in rows if "loss" in r]
    # Of an even load the auxiliary loss is 1, and logits of unit noise have log Σ exp ≈ ln 6 + ½: it can't be far.
    assert steps[0]["router_loss"] == pytest.approx(1e-2 * 1.1 + 1e-3 * 5.2, rel=0.3)
    evaluations = [r for r in rows if "experts" in r]
    assert [r["step"] for r in evaluations] == [15, 30, 45, 60]
    for row in evaluations:
        (layer,) = msgspec.convert(row["experts"], list[ExpertLayer])
        assert layer.layer == 1  # the first layer is dense
        assert len(layer.load) == 6
        assert sum(layer.load) == pytest.approx(1)
        assert 0 < layer.entropy <= 1 + 1e-6
        assert layer.max_over_mean >= 1 - 1e-6
        assert layer.dead == sum(share == 0 for share in layer.load)
        assert 1 / 6 < layer.confidence <= 1
        assert 0 < layer.routed_share < 1
        assert layer.similarity is not None
        assert -0.2 < layer.similarity < 1


def test_a_model_without_mixtures_says_nothing_of_experts(home: Path) -> None:
    run_it(tiny(), home / "r")
    rows = list(record.read_rows(home / "r" / "metrics.jsonl"))
    assert not any("experts" in r or "router_loss" in r for r in rows)
    assert expert_statistics(TensorTransformer(tiny().model), torch.zeros(1, 3, dtype=torch.int64), "float32") == []


KINDS: dict[str, dict[str, object]] = {
    "adamw": {"optimizer": AdamW(lr=1e-2)},
    "muon": {"optimizer": Muon(lr=1e-2)},
    "accumulated": {"micro_batch_size": 2},
    "bf16": {"precision": "bf16"},
}
SLOWER = ["accumulated", "bf16"]


@pytest.mark.parametrize("kind", ["adamw", "muon", *(pytest.param(k, marks=pytest.mark.slow) for k in SLOWER)])
def test_an_interrupted_run_ends_with_the_same_bits(moe_home: Path, kind: str) -> None:
    run = tiny(**KINDS[kind])
    run_it(run, moe_home / "whole")
    for more in (1, 6, 5):  # off and on the steps at which checkpoints are due
        asked = iter([False] * (more - 1) + [True])
        with pytest.raises(Interrupted):
            run_it(run, moe_home / "cut", should_stop=lambda asked=asked: next(asked))
    run_it(run, moe_home / "cut")
    same_bits(moe_home / "whole", moe_home / "cut")
    bias = trained(run, moe_home / "whole").get_buffer("layers.1.ffn.router.correction_bias")
    assert bias.abs().amax() > 0.01
    assert abs(bias.mean()) < 1e-7


def test_the_bit_check_catches_a_resume_that_forgets_the_biases(
    moe_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_it(tiny(), moe_home / "whole")
    with pytest.raises(Interrupted):
        run_it(tiny(), moe_home / "cut", should_stop=lambda: True)
    load = checkpoint.load

    def forgetful(path: Path, model: nn.Module, *rest: Any) -> checkpoint.Meta:
        meta = load(path, model, *rest)
        model.get_buffer("layers.1.ffn.router.correction_bias").zero_()
        return meta

    monkeypatch.setattr(checkpoint, "load", forgetful)
    run_it(tiny(), moe_home / "cut")
    with pytest.raises(AssertionError):
        same_bits(moe_home / "whole", moe_home / "cut")


def test_a_checkpoint_without_the_biases_is_of_another_model(moe_home: Path) -> None:
    run_it(tiny(), moe_home / "r")
    moe = cast(MoE, tiny().model.ffns["moe"])
    plain = msgspec.structs.replace(tiny().model, ffns={**tiny().model.ffns, "moe": msgspec.structs.replace(
        moe, balance=Balance())})  # fmt: skip
    last = checkpoint.latest(moe_home / "r")
    assert last is not None
    with pytest.raises(CheckpointError, match="holds another model"):
        checkpoint.load(last, TensorTransformer(plain))


def test_a_nan_in_the_router_is_named(moe_home: Path) -> None:
    with pytest.raises(Interrupted):
        run_it(tiny(), moe_home / "r", should_stop=lambda: True)
    model = trained(tiny(), moe_home / "r")
    with torch.no_grad():
        model.get_parameter("layers.1.ffn.router.proj.weight")[0, 0] = torch.nan
    checkpoint.save(moe_home / "r", 1, 0.0, model, make_optimizers(model, tiny().train.optimizer))
    with pytest.raises(DivergenceError, match=r"step 2: .*first in the output of layers\.1\.ffn\.router;"):
        run_it(tiny(), moe_home / "r")


TABLE = MoE(
    n_experts=6,
    routed=Experts("bilinear", 8, bias=True),
    router=Router(top_k=2, bias=True),
    shared=Experts("swiglu", 12),
    balance=Balance(bias_update_speed=0.01, z_loss_coef=0.01),
)
SWISH: Any = {"name": "swish_glu", "beta": Learned(1.0)}
STEPS = Train(tokens=2048, context=16, batch_size=8, optimizer=AdamW(lr=1e-2), schedule=Cosine(warmup_steps=1))


def config(*tables: MoE) -> Model:
    names = [f"f{i}" for i in range(len(tables))]
    return Model(
        d_model=16,
        n_layers=len(tables),
        vocab_size=31,
        mixers={"a": SoftmaxAttention(n_heads=2)},
        ffns=dict(zip(names, tables, strict=True)),
        layers=tuple(Layer(mixer="a", ffn=name) for name in names),
    )


def batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    text = torch.randint(31, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def after_steps(micro: int | None, table: MoE = TABLE, steps: int = 5) -> tuple[TensorTransformer, list[list[float]]]:
    """Return a model after a few steps, in float64, and what each step said."""
    model = TensorTransformer(config(table, table)).double()
    optimizers = make_optimizers(model, STEPS.optimizer)
    how, tables = msgspec.structs.replace(STEPS, micro_batch_size=micro), [m.config for m in model.mixtures()]
    said = [list(training_step(model, optimizers, *batch(i), how, tables)) for i in range(steps)]
    return model, said


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("micro", [1, 4])
def test_accumulation_changes_no_bias_and_no_loss(micro: int) -> None:
    """Losses that are means over tokens, the z-loss among them, are those of the whole batch."""
    (whole, said), (parts, also) = after_steps(None), after_steps(micro)
    torch.testing.assert_close(torch.tensor(also), torch.tensor(said), rtol=1e-5, atol=1e-7)
    a, b = state(whole), state(parts)
    for name, t in a.items():
        if "correction_bias" in name:
            assert t.abs().amax() > 0.02
            assert torch.equal(b[name], t)
        else:
            torch.testing.assert_close(b[name], t, rtol=1e-4, atol=1e-5)


def test_biases_that_move_with_every_micro_batch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TensorTransformer.forward

    def eager(self: TensorTransformer, *arguments: Any) -> Tensor:
        logits = forward(self, *arguments)
        training.update_biases(self)
        return logits

    monkeypatch.setattr(TensorTransformer, "forward", eager)
    with pytest.raises(AssertionError):
        test_accumulation_changes_no_bias_and_no_loss(4)


def test_a_step_moves_the_biases_by_its_own_load_and_counts_anew() -> None:
    model, optimizers = TensorTransformer(config(TABLE)), []
    router = model.mixtures()[0].router
    optimizers = make_optimizers(model, STEPS.optimizer)
    inputs, targets = batch(0)
    counts: list[Tensor] = []
    handle = router.register_forward_hook(
        lambda _module, _inputs, routing: counts.append(torch.bincount(routing.indices.flatten(), minlength=6))
    )
    training_step(model, optimizers, inputs, targets, msgspec.structs.replace(STEPS, micro_batch_size=2), [TABLE])
    handle.remove()
    load = torch.stack(counts).sum(0)
    assert load.sum() == 2 * inputs.numel()
    moved = 0.01 * (load.double().mean() - load).sign()
    assert router.correction_bias is not None
    assert router.load is not None
    torch.testing.assert_close(router.correction_bias.double(), moved - moved.mean(), rtol=1e-6, atol=1e-8)
    assert router.load.tolist() == [0] * 6


def test_the_balancing_losses_are_added_to_what_is_trained() -> None:
    model = TensorTransformer(config(TABLE))
    inputs, targets = batch(0)
    found = {}
    for coefficient in (0.0, 5.0):
        table = msgspec.structs.replace(TABLE, balance=Balance(aux_loss_coef=coefficient))
        copy = TensorTransformer(config(table))
        taken = training_step(
            copy, make_optimizers(copy, STEPS.optimizer), inputs, targets,
            msgspec.structs.replace(STEPS, grad_clip=None), [table],
        )  # fmt: skip
        found[coefficient] = taken
        changed = copy.get_parameter("layers.0.ffn.router.proj.weight")
        assert not torch.equal(changed, model.get_parameter("layers.0.ffn.router.proj.weight"))
    assert found[0.0].loss == found[5.0].loss  # the loss that is told is that of the text
    assert found[0.0].router_loss == 0
    assert found[5.0].router_loss >= 5
    assert found[0.0].grad_norm != found[5.0].grad_norm


@pytest.mark.parametrize("balance", [Balance(bias_update_speed=0.02), Balance(aux_loss_coef=1.0)], ids=["bias", "loss"])
def test_a_skewed_router_is_evened_in_training(balance: Balance) -> None:
    table = msgspec.structs.replace(TABLE, balance=balance)
    model = TensorTransformer(config(table))
    with torch.no_grad():
        model.get_parameter("layers.0.ffn.router.proj.bias")[:2] = 3.0
    optimizers, inputs = make_optimizers(model, STEPS.optimizer), batch(0)[0]
    (before,) = expert_statistics(model, inputs, "float32")
    for i in range(100):
        training_step(model, optimizers, *batch(i), STEPS, [table])
    (after,) = expert_statistics(model, inputs, "float32")
    assert before.entropy < 0.6
    assert after.entropy > before.entropy + 0.2
    assert after.max_over_mean < before.max_over_mean
    bias = model.mixtures()[0].router.correction_bias
    assert bias is None or abs(bias.mean()) < 1e-7


def test_evaluation_moves_nothing() -> None:
    model, _ = after_steps(None)
    model = model.float()
    router = model.mixtures()[0].router
    assert router.load is not None
    router.load[0] = 7  # as if in the middle of a step
    before = state(model)
    evaluate.score(model, [batch(9)], "float32")
    expert_statistics(model, batch(9)[0], "bf16")
    assert model.training
    after = state(model)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    model.eval()
    expert_statistics(model, batch(9)[0], "float32")
    assert not model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_statistics_that_fail_leave_no_hook_behind() -> None:
    model = TensorTransformer(config(TABLE))
    with pytest.raises(IndexError):
        expert_statistics(model, torch.full((1, 3), 99), "float32")
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_optimisers_hold_every_parameter_once_and_decay_matrices_alone() -> None:
    table = MoE(
        n_experts=6,
        routed=Experts(SWISH, 8, bias=True),
        router=Router(top_k=2, bias=True),
        shared=Experts(SWISH, 12, bias=True),
        latent=4,
        balance=Balance(bias_update_speed=0.01),
    )
    model = TensorTransformer(config(table))
    names = {p: n.removeprefix("layers.0.ffn.") for n, p in model.named_parameters()}
    undecayed = {
        "router.proj.bias",
        "routed.gate_up_bias",
        "routed.down_bias",
        "routed.learned.beta",
        *(f"shared.0.{n}.bias" for n in ("gate_proj", "up_proj", "down_proj")),
        "shared.0.learned.beta",
    }
    for optimizer in (AdamW(lr=1e-3), Muon(lr=1e-3)):
        groups = [g for o in make_optimizers(model, optimizer) for g in o.param_groups]
        held = [names[p] for g in groups for p in g["params"]]
        assert sorted(held) == sorted(names.values())
        free = {names[p] for g in groups if g["weight_decay"] == 0 for p in g["params"]}
        assert {n for n in free if "norm" not in n} == undecayed
    muon, adamw = make_optimizers(model, Muon(lr=1e-3))
    taken = {names[p] for g in muon.param_groups for p in g["params"]}
    assert {"router.proj.weight", "latent_in.weight", "latent_out.weight", "shared.0.down_proj.weight"} <= taken
    rest = {names[p] for g in adamw.param_groups for p in g["params"]}
    assert {"routed.gate_up", "routed.down", *undecayed} <= rest


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2), Muon(lr=1e-2)], ids=["adamw", "muon"])
def test_a_step_moves_every_parameter_of_a_mixture(optimizer: AdamW | Muon) -> None:
    table = msgspec.structs.replace(TABLE, routed=Experts(SWISH, 8, bias=True), latent=4)
    model = TensorTransformer(config(table))
    before = state(model)
    how = msgspec.structs.replace(STEPS, optimizer=optimizer)
    training_step(model, make_optimizers(model, optimizer), *batch(0), how, [table])
    after = state(model)
    assert all(not torch.equal(after[name], before[name]) for name, _ in model.named_parameters())
