"""Models with mixtures of experts: documents apart, decoding, first weights, recomputation and one graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tensorformer.config.schema import (
    Balance,
    Experts,
    FeedForward,
    Layer,
    LinearAttention,
    Model,
    MoE,
    Router,
    SoftmaxAttention,
)
from tensorformer.nn.balancing import router_loss
from tensorformer.nn.block import Block
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.moe import MoE as MoELayer
from tensorformer.nn.norm import unit_rms
from tensorformer.nn.router import Routing
from tensorformer.nn.state import State

ROOT = Path(__file__).parents[2]
VOCAB, PADDING = 31, -1
HYBRID = MoE(
    n_experts=5,
    routed=Experts("bilinear", 6),
    router=Router(top_k=2),
    shared=Experts("swiglu", 4),
    n_shared_experts=2,
    balance=Balance(aux_loss_coef=0.1, z_loss_coef=0.01, bias_update_speed=0.01),
)
LATENT = MoE(
    n_experts=4,
    routed=Experts("relu2", 3, bias=True),
    router=Router(top_k=3, scores="sigmoid", n_group=2, topk_group=2),
    balance=Balance(aux_loss="sequence", aux_loss_coef=0.1),
    latent=5,
)


def config(*ffns: str) -> Model:
    """Return the config of a model whose blocks have these feed-forward parts, and attention of two kinds in turn."""
    return Model(
        d_model=8,
        n_layers=len(ffns),
        vocab_size=VOCAB,
        mixers={"a": SoftmaxAttention(n_heads=2), "b": LinearAttention(preset="bilinear_norm", n_heads=2)},
        ffns={"dense": FeedForward(gate="swiglu", d_ff=12), "hybrid": HYBRID, "latent": LATENT},
        layers=tuple(Layer(mixer="ab"[i % 2], ffn=ffn) for i, ffn in enumerate(ffns)),
    )


def double(*ffns: str, seed: int = 0) -> TensorTransformer:
    """Return a model in float64 far from its small first weights, so that a mistake shows."""
    model, draws = TensorTransformer(config(*ffns)).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=draws, dtype=torch.float64))
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_pattern_may_begin_dense() -> None:
    model = TensorTransformer(config("dense", "hybrid", "latent", "hybrid"))
    kinds = [isinstance(block.ffn, MoELayer) for block in cast(list[Block], list(model.layers))]
    assert kinds == [False, True, True, True]
    assert [m.config for m in model.mixtures()] == [HYBRID, LATENT, HYBRID]
    routings: list[Routing] = []
    model(tokens(2, 7), None, routings)
    assert [r.logits.shape for r in routings] == [(14, 5), (14, 4), (14, 5)]
    assert TensorTransformer(config("dense")).mixtures() == []


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_packed_documents_are_documents_alone(lengths: list[int], seed: int) -> None:
    model = double("dense", "hybrid", "latent", seed=seed)
    documents = [tokens(1, n, seed=seed + i) for i, n in enumerate(lengths)]
    segments = torch.repeat_interleave(torch.tensor(lengths))[None]
    together, alone = model(torch.cat(documents, 1), segments), [model(d) for d in documents]
    close(together, torch.cat(alone, 1))


def check_padded(model: TensorTransformer, left: int, right: int, length: int, seed: int) -> None:
    """Fail unless a padded row is the row alone, and its losses and counts too."""
    tables = [m.config for m in model.mixtures()]
    row, width = tokens(1, length, seed=seed), left + length + right
    padded, segments = tokens(1, width, seed=seed + 1), torch.full((1, width), PADDING)
    padded[:, left : left + length], segments[:, left : left + length] = row, 0
    seen: dict[str, list[Routing]] = {"alone": [], "padded": []}
    found = {"alone": model(row, None, seen["alone"]), "padded": model(padded, segments, seen["padded"])}
    close(found["padded"][:, left : left + length], found["alone"])
    losses = [router_loss(list(zip(tables, seen[name], strict=True)), 1) for name in ("alone", "padded")]
    close(losses[1], losses[0])
    load = model.mixtures()[0].router.load
    assert load is not None
    assert load.sum() == 2 * 2 * length  # twice the tokens, two choices each


@settings(max_examples=10)
@given(left=st.integers(0, 5), right=st.integers(0, 5), length=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_padded_row_is_the_row_alone_and_so_are_its_losses(left: int, right: int, length: int, seed: int) -> None:
    check_padded(double("hybrid", "latent", seed=seed), left, right, length, seed)


def test_padding_that_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MoELayer.forward
    monkeypatch.setattr(MoELayer, "forward", lambda self, x, real, routings: forward(self, x, None, routings))
    with pytest.raises(AssertionError):
        check_padded(double("hybrid", "latent"), 2, 1, 5, 0)


def test_a_row_of_padding_changes_no_other() -> None:
    model = double("hybrid", "latent")
    x, segments = tokens(3, 7), torch.zeros(3, 7, dtype=torch.int64)
    segments[1] = PADDING
    close(model(x, segments)[[0, 2]], model(x[[0, 2]]))


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4), training=st.booleans())
def test_decoding_in_pieces_equals_the_whole(cuts: list[int], training: bool) -> None:
    model = double("dense", "hybrid", "latent").train(training)
    x = tokens(2, sum(cuts))
    whole, state, position = model(x), model.initial_state(2), 0
    for n in cuts:
        logits, state = model.decode(x[:, position : position + n], state)
        position += n
        close(logits, whole[:, position - 1])


def test_decoding_rows_of_different_length_is_decoding_them_alone() -> None:
    model = double("hybrid", "latent")
    x, segments = tokens(2, 5), torch.zeros(2, 5, dtype=torch.int64)
    segments[0, :3] = PADDING
    logits, state = model.decode(x, model.initial_state(2), segments)
    following = tokens(2, 1, seed=1)
    then, _ = model.decode(following, state)
    for row, start in ((0, 3), (1, 0)):
        alone: State = model.initial_state(1)
        first, alone = model.decode(x[row : row + 1, start:], alone)
        close(logits[row : row + 1], first)
        close(then[row : row + 1], model.decode(following[row : row + 1], alone)[0])


def test_gradients_reach_every_parameter() -> None:
    model = double("hybrid", "latent")
    routings: list[Routing] = []
    logits = model(tokens(4, 16), None, routings)
    tables = [m.config for m in model.mixtures()]
    (logits.square().mean() + router_loss(list(zip(tables, routings, strict=True)), 4)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().amax() > 0, name


FIRST = {
    "hybrid": MoE(n_experts=16, routed=Experts("bilinear", 64), router=Router(top_k=2), shared=Experts("swiglu", 64)),
    "relu2, two shared": MoE(
        n_experts=16,
        routed=Experts("relu2", 64),
        router=Router(top_k=4),
        shared=Experts("relu2", 32),
        n_shared_experts=2,
    ),
    "latent": MoE(
        n_experts=16, routed=Experts("swiglu", 64), router=Router(top_k=2), shared=Experts("swiglu", 64), latent=64
    ),
    "one choice": MoE(
        n_experts=16, routed=Experts("swiglu", 64), router=Router(top_k=1), balance=Balance(aux_loss_coef=0.01)
    ),
}


def written(ffn: FeedForward | MoE) -> tuple[Any, Tensor]:
    """Return the feed-forward part of a new model, and what it writes for normed inputs."""
    model = Model(
        d_model=128,
        n_layers=2,
        vocab_size=VOCAB,
        mixers={"a": SoftmaxAttention(n_heads=2)},
        ffns={"f": ffn},
        layers=(Layer(mixer="a", ffn="f"),),
    )
    layer = TensorTransformer(model).get_submodule("layers.0.ffn")
    x = unit_rms(torch.randn(4096, 128), 1e-6)
    return layer, layer(x).detach()


@pytest.mark.parametrize("ffn", FIRST.values(), ids=FIRST)
def test_first_weights_write_at_the_scale_of_a_dense_layer(ffn: MoE) -> None:
    """Within a factor of two in the second moment: the weights of several routed experts sum to one, not squared."""
    _, dense = written(FeedForward(gate="swiglu", d_ff=128))
    layer, y = written(ffn)
    assert 1 / 2 < y.square().mean() / dense.square().mean() < 2
    spread = [layer.routed.gate_up[e].std() * 128**0.5 for e in range(16)] if ffn.latent is None else []
    assert all(0.9 < s < 1.1 for s in spread)  # each expert begins alike, and as a layer of its own


def test_no_two_experts_begin_as_one() -> None:
    model = TensorTransformer(config("hybrid", "hybrid"))
    flat = [expert.flatten() for m in model.mixtures() for expert in m.routed.gate_up]
    flat += [s.get_parameter("up_proj.weight").flatten() for m in model.mixtures() for s in m.shared or ()]
    for i, a in enumerate(flat):
        for b in flat[:i]:
            assert a.shape != b.shape or torch.nn.functional.cosine_similarity(a, b, dim=0).abs() < 0.6
    again = TensorTransformer(config("hybrid", "hybrid"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_a_block_counts_once_and_gives_the_same_gradients(use_reentrant: bool) -> None:
    model = double("hybrid")
    block = cast(Block, model.layers[0])
    router = model.mixtures()[0].router
    x, segments = torch.randn(3, 5, 8, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.int64)
    segments[1, 3:] = PADDING
    found = []
    for recomputed in (False, True):
        assert router.load is not None
        router.load.zero_()
        leaf, arguments = x.clone().requires_grad_(), (None, segments)
        if recomputed:
            y, _ = cast(Any, checkpoint(block, leaf, *arguments, use_reentrant=use_reentrant))
        else:
            y, _ = block(leaf, *arguments)
        counted = router.load.clone()
        block.zero_grad()
        y.square().sum().backward()
        assert torch.equal(router.load, counted)
        assert counted.sum() == 2 * 13
        found.append([counted, y.detach(), leaf.grad, *(p.grad for p in block.parameters())])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert torch.equal(a, b)


def test_a_recomputed_block_passes_on_the_gradient_of_its_losses() -> None:
    model = double("hybrid")
    block, x = cast(Block, model.layers[0]), torch.randn(3, 5, 8, dtype=torch.float64)
    found = []
    for recomputed in (False, True):
        routings: list[Routing] = []
        leaf = x.clone().requires_grad_()
        arguments = (leaf, None, None, routings)
        y, _ = cast(Any, checkpoint(block, *arguments, use_reentrant=False)) if recomputed else block(*arguments)
        loss = y.square().sum() + router_loss([(HYBRID, routings[0])], 3)
        found.append(torch.autograd.grad(loss, [leaf, *block.parameters()]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


COMPILED = """
import sys
import torch
torch.set_num_threads(1)
from tests.nn.test_moe_model import config, tokens
from tensorformer.nn.balancing import router_loss
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.router import update_biases

backend, *ffns = sys.argv[1:]
model = TensorTransformer(config(*ffns))
compiled = torch.compile(model, fullgraph=True, backend=backend)
tables = [m.config for m in model.mixtures()]
x, segments = tokens(2, 9), torch.zeros(2, 9, dtype=torch.int64)
segments[0, :4] = -1
for given in (None, segments):
    seen = []
    for forward in (model, compiled):
        routings = []
        logits = forward(x, given, routings)
        assert len(routings) == len(tables)
        loss = logits.square().mean() + router_loss(list(zip(tables, routings)), 2)
        model.zero_grad()
        loss.backward()
        load = model.mixtures()[-1].router.load
        seen.append([logits.detach(), loss.detach(), load.clone(), *(p.grad for p in model.parameters())])
        load.zero_()
    for a, b in zip(*seen):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert seen[0][2].sum() == 2 * (18 if given is None else 14)
with torch.no_grad():
    torch.testing.assert_close(compiled.eval()(x), model(x), rtol=1e-4, atol=1e-5)
model.mixtures()[-1].router.load[0] = 1
update_biases(compiled)
assert model.mixtures()[-1].router.correction_bias.abs().sum() > 0
print("same")
"""


@pytest.mark.parametrize(
    ("backend", "ffns"),
    [
        ("aot_eager", ["hybrid"]),
        pytest.param("aot_eager", ["dense", "latent", "hybrid"], marks=pytest.mark.slow),
        pytest.param("inductor", ["latent", "hybrid"], marks=pytest.mark.slow),
    ],
)
def test_one_graph(backend: str, ffns: list[str]) -> None:
    """In a process of its own: the annotation checks that pytest switches on cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, backend, *ffns], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]
