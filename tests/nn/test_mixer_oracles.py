"""Presets against the layers of transformers, with the same weights: outputs, gradients, and decoding."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorformer.config.schema import LinearAttention, SoftmaxAttention
from tensorformer.nn.linear_attention import LinearAttention as LinearAttentionLayer
from tensorformer.nn.softmax_attention import SoftmaxAttention as SoftmaxAttentionLayer

pytestmark = pytest.mark.real
transformers = pytest.importorskip("transformers")

D, TIME = 24, 70


def fill(peer: nn.Module) -> None:
    """Give a peer weights that make everything it does matter."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in peer.named_parameters():
            if "A_log" in name:
                p.copy_(torch.rand(p.shape, generator=draws))
            elif "norm" in name:
                p.copy_(1 + 0.2 * torch.randn(p.shape, generator=draws))
            else:
                p.copy_(torch.randn(p.shape, generator=draws) * 0.3)


def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs.reshape(ours.shape))


def qwen() -> tuple[nn.Module, LinearAttentionLayer, list[tuple[str, str]]]:
    m: Any = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")

    h_k, h_v, k, v = 2, 4, 6, 5
    config = m.Qwen3NextConfig(
        hidden_size=D,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=h_k,
        linear_num_value_heads=h_v,
        linear_key_head_dim=k,
        linear_value_head_dim=v,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
    )
    peer: Any = m.Qwen3NextGatedDeltaNet(config, 0)
    fill(peer)
    ours: Any = LinearAttentionLayer(
        LinearAttention(preset="gdn", n_heads=h_v, n_key_heads=h_k, head_dim=k, value_dim=v), D, 1e-6
    )
    # Theirs has q, k, v and z of one key head side by side, then those of the next.
    per_head = peer.in_proj_qkvz.weight.view(h_k, -1, D).split([k, k, 2 * v, 2 * v], 1)
    b, a = peer.in_proj_ba.weight.view(h_k, 4, D).split([2, 2], 1)
    copy(
        [
            (ours.q_proj[0].weight, per_head[0]),
            (ours.k_proj[0].weight, per_head[1]),
            (ours.v_proj.weight, per_head[2]),
            (ours.output.gate_proj.weight, per_head[3]),
            (ours.beta_proj.weight, b),
            (ours.decay.proj.weight, a),
            (ours.decay.A_log, peer.A_log),
            (ours.decay.dt_bias, peer.dt_bias),
            (ours.convolution.weight, peer.conv1d.weight),
            (ours.output.weight, peer.norm.weight),
            (ours.o_proj.weight, peer.out_proj.weight),
        ]
    )
    same = [("convolution.weight", "conv1d.weight"), ("decay.A_log", "A_log"), ("decay.dt_bias", "dt_bias")]
    return peer, ours, [*same, ("output.weight", "norm.weight"), ("o_proj.weight", "out_proj.weight")]


def kimi() -> tuple[nn.Module, LinearAttentionLayer, list[tuple[str, str]]]:
    m: Any = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")

    h, k = 3, 6
    config = m.KimiLinearConfig(
        hidden_size=D,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=h,
        linear_head_dim=k,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
    )
    peer: Any = m.KimiLinearDeltaAttention(config, 0)
    fill(peer)
    ours: Any = LinearAttentionLayer(LinearAttention(preset="kda", n_heads=h, head_dim=k, value_dim=k), D, 1e-6)
    same = [
        ("q_proj.0.weight", "q_proj.weight"),
        ("k_proj.0.weight", "k_proj.weight"),
        ("v_proj.weight", "v_proj.weight"),
        ("beta_proj.weight", "b_proj.weight"),
        ("decay.proj.down.weight", "forget_gate.f_a_proj.weight"),
        ("decay.proj.up.weight", "forget_gate.f_b_proj.weight"),
        ("decay.A_log", "forget_gate.A_log"),
        ("decay.dt_bias", "forget_gate.dt_bias"),
        ("output.gate_proj.down.weight", "g_a_proj.weight"),
        ("output.gate_proj.up.weight", "g_b_proj.weight"),
        ("output.weight", "o_norm.weight"),
        ("convolution.weight", "conv1d.weight"),
        ("o_proj.weight", "o_proj.weight"),
    ]
    copy([(ours.get_parameter(a), peer.get_parameter(b)) for a, b in same])
    return peer, ours, same


def mamba() -> tuple[nn.Module, LinearAttentionLayer, list[tuple[str, str]]]:
    m: Any = importlib.import_module("transformers.models.mamba2.modeling_mamba2")

    h, state, v = 6, 7, 8
    config = m.Mamba2Config(
        hidden_size=D,
        num_hidden_layers=1,
        num_heads=h,
        head_dim=v,
        state_size=state,
        expand=2,
        n_groups=1,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        chunk_size=16,
        layer_norm_epsilon=1e-6,
    )
    peer: Any = m.Mamba2Mixer(config, 0).eval()
    fill(peer)
    ours: Any = LinearAttentionLayer(LinearAttention(preset="ssd", n_heads=h, head_dim=state, value_dim=v), D, 1e-6)
    gate, values, keys, queries, step = peer.in_proj.weight.split([h * v, h * v, state, state, h])
    taps, bias = (x.split([h * v, state, state]) for x in (peer.conv1d.weight, peer.conv1d.bias))
    copy(
        [
            (ours.output.gate_proj.weight, gate),
            (ours.v_proj.weight, values),
            (ours.k_proj[0].weight, keys),
            (ours.q_proj[0].weight, queries),
            (ours.decay.proj.weight, step),
            (ours.convolution.weight, torch.cat((taps[2], taps[1], taps[0]))),
            (ours.convolution.bias, torch.cat((bias[2], bias[1], bias[0]))),
            (ours.decay.A_log, peer.A_log),
            (ours.decay.dt_bias, peer.dt_bias),
            (ours.skip, peer.D),
            (ours.output.weight, peer.norm.weight),
            (ours.o_proj.weight, peer.out_proj.weight),
        ]
    )
    same = [("decay.A_log", "A_log"), ("decay.dt_bias", "dt_bias"), ("skip", "D")]
    return peer, ours, [*same, ("output.weight", "norm.weight"), ("o_proj.weight", "out_proj.weight")]


PEERS = {"gdn of Qwen3-Next": qwen, "kda of Kimi Linear": kimi, "ssd of Mamba-2": mamba}


def agree(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    scale = float(theirs.detach().abs().max())
    torch.testing.assert_close(ours, theirs.view_as(ours), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", PEERS)
def test_outputs_and_gradients_are_the_peers(name: str) -> None:
    peer, ours, same = PEERS[name]()
    x = torch.randn(2, TIME, D, generator=torch.Generator().manual_seed(1))
    dy = torch.randn(2, TIME, D, generator=torch.Generator().manual_seed(2))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    theirs, mine = peer(leaves[0], attention_mask=None), ours(leaves[1])[0]
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    agree(mine, theirs)
    (theirs * dy).sum().backward()
    (mine * dy).sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    agree(leaves[1].grad, leaves[0].grad, 1e-4)
    for a, b in same:
        agree(ours.get_parameter(a).grad, peer.get_parameter(b).grad, 1e-4)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", PEERS)
def test_a_weight_a_little_off_is_caught(name: str) -> None:
    peer, ours, _ = PEERS[name]()
    with torch.no_grad():
        ours.get_parameter("decay.dt_bias").add_(1e-3)
    x = torch.randn(1, TIME, D, generator=torch.Generator().manual_seed(1))
    theirs = peer(x, attention_mask=None)
    with pytest.raises(AssertionError):
        agree(ours(x)[0], theirs[0] if isinstance(theirs, tuple) else theirs)


@pytest.mark.parametrize("window", [None, 5])
def test_softmax_is_the_peers_with_and_without_a_window(window: int | None) -> None:
    m: Any = importlib.import_module("transformers.models.mistral.modeling_mistral")

    config = m.MistralConfig(
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=8,
        vocab_size=9,
        sliding_window=window,
        rope_theta=10_000.0,
        attn_implementation="eager",
    )
    model: Any = m.MistralModel(config)
    layer = model.layers[0]
    fill(model)
    seen: dict[str, Tensor] = {}
    layer.self_attn.register_forward_hook(
        lambda _, a, kw, out: seen.update(x=kw["hidden_states"], y=out[0]), with_kwargs=True
    )
    model(torch.arange(9)[None].repeat(2, 4))
    ours = SoftmaxAttentionLayer(SoftmaxAttention(n_heads=4, n_kv_heads=2, head_dim=6, window=window), D, 1e-6)
    copy([(ours.get_parameter(n), p) for n, p in layer.self_attn.named_parameters()])
    agree(ours(seen["x"])[0], seen["y"])
