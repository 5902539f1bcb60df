"""transformers' Llama as an oracle of the whole model, and the benchmark that is run against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tensorformer.bench.peers import llama_like, llama_shape
from tensorformer.bench.train import against_llama
from tensorformer.nn.model import TensorTransformer


def test_softmax_and_swiglu_are_llama() -> None:
    ours = TensorTransformer(llama_shape(d_model=48, n_layers=3, n_heads=4, d_ff=80))
    theirs = llama_like(ours)
    tokens = torch.randint(256, (2, 33))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    for logits in (ours(tokens), theirs(tokens).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, peer in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("layers.1.mixer.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("layers.2.ffn.gate_proj.weight", "model.layers.2.mlp.gate_proj.weight"),
        ("layers.0.mixer_norm.weight", "model.layers.0.input_layernorm.weight"),
    ):
        torch.testing.assert_close(ours.get_parameter(name).grad, theirs.get_parameter(peer).grad, rtol=1e-4, atol=1e-6)


def test_the_oracle_catches_gate_and_up_swapped() -> None:
    ours = TensorTransformer(llama_shape(d_model=48, n_layers=1, d_ff=80))
    theirs = llama_like(ours)
    with torch.no_grad():
        gate, up = (ours.get_parameter(f"layers.0.ffn.{n}_proj.weight") for n in ("gate", "up"))
        kept = gate.clone()
        gate.copy_(up)
        up.copy_(kept)
    tokens = torch.randint(256, (1, 9))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.real
def test_the_benchmark_reports_a_ratio_for_each_precision() -> None:
    lines = list(against_llama(torch.device("cpu"), rounds=1))
    assert [line.partition(":")[0] for line in lines] == ["float32", "bf16"]
    assert all("ratio" in line for line in lines)
