"""Every mixer there is, and the laws that each must obey: functions that fail, so that they can be tested too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from tensorformer.config.schema import LinearAttention, LinearPreset, SoftmaxAttention
from tensorformer.nn.linear_attention import LinearAttention as LinearAttentionLayer
from tensorformer.nn.softmax_attention import SoftmaxAttention as SoftmaxAttentionLayer

D_MODEL = 8
SIZES: dict[str, Any] = {"n_heads": 2, "head_dim": 6, "value_dim": 5}
CONFIGS: dict[str, SoftmaxAttention | LinearAttention] = {
    "softmax": SoftmaxAttention(n_heads=2),
    "grouped": SoftmaxAttention(n_heads=4, n_kv_heads=2, head_dim=6, qk_norm=True),
    "nope": SoftmaxAttention(n_heads=2, position="none"),
    "window": SoftmaxAttention(n_heads=2, window=3),
    **{p: LinearAttention(preset=p, **SIZES) for p in get_args(LinearPreset)},
    "bilinear over positions": LinearAttention(preset="bilinear", output_norm="position", **SIZES),
    "bilinear with a gate": LinearAttention(preset="bilinear_norm", output_gate="sigmoid", **SIZES),
    "gdn with shared keys": LinearAttention(preset="gdn", n_heads=4, n_key_heads=2, head_dim=3, value_dim=5),
    "gdn that turns": LinearAttention(preset="gdn", allow_neg_eigval=True, **SIZES),
    "ssd in groups": LinearAttention(preset="ssd", n_heads=4, n_key_heads=2, head_dim=3, value_dim=5),
}
Mixer = SoftmaxAttentionLayer | LinearAttentionLayer


def make(config: SoftmaxAttention | LinearAttention, seed: int = 0) -> Mixer:
    """Return a mixer in float64 whose weights are large enough for a mistake to show."""
    kind = SoftmaxAttentionLayer if isinstance(config, SoftmaxAttention) else LinearAttentionLayer
    mixer = kind(config, D_MODEL, 1e-6).double()  # pyright: ignore[reportArgumentType]
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn(p.shape, generator=draws, dtype=torch.float64) * (0.6 if p.ndim > 1 else 0.3))
    return mixer


def inputs(*shape: int, seed: int = 1) -> Tensor:
    """Return random inputs (batch, time, width)."""
    return torch.randn(*shape, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    """Fail unless two tensors agree to ``tolerance`` of their size."""
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max([1.0, *b.detach().abs().flatten().tolist()]))


def check_pieces(mixer: Any, cuts: list[int]) -> None:
    """Fail unless going on from a state equals the whole, then and later, and leaves the state as it is."""
    x = inputs(2, sum(cuts))
    whole, end = mixer(x, mixer.initial_state(2))
    close(mixer(x)[0], whole)
    state, at, parts = mixer.initial_state(2), 0, []
    for n in cuts:
        before = [t.clone() for t in state if isinstance(t, Tensor)]
        y, after = mixer(x[:, at : at + n], state)
        again, _ = mixer(x[:, at : at + n], state)
        assert torch.equal(y, again)
        kept = [t for t in state if isinstance(t, Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
        state, at, parts = after, at + n, [*parts, y]
    close(torch.cat(parts, 1), whole)
    assert torch.equal(state.seen, end.seen)
    following = inputs(2, 3, seed=5)
    close(mixer(following, state)[0], mixer(following, end)[0])


def check_causal(mixer: Any) -> None:
    """Fail if a token changes what comes before it, or changes nothing."""
    x = inputs(2, 9)
    for at in (0, 4, 8):
        changed = x.clone()
        changed[:, at] += 1
        a, b = mixer(x)[0], mixer(changed)[0]
        close(a[:, :at], b[:, :at], 1e-12)
        assert not torch.allclose(a[:, at], b[:, at])


def check_padding(mixer: Any, rows: list[list[int]], fill: float = 7.0) -> None:
    """Fail unless each row, padded, equals the row alone, and so does what it goes on with.

    Args:
        mixer: the one.
        rows: 1 for a token, 0 for padding.
        fill: what stands in padding; may be NaN.
    """
    mask = torch.tensor(rows, dtype=torch.bool)
    x = inputs(*mask.shape).masked_fill(~mask.unsqueeze(2), fill)
    segments = torch.where(mask, 0, -1)
    y, state = mixer(x, mixer.initial_state(len(rows)), segments)
    stateless = mixer(x, None, segments)[0]
    following = inputs(len(rows), 4, seed=9)
    further = mixer(following, state)[0]
    for i, row in enumerate(mask):
        alone, own = mixer(x[i : i + 1, row], mixer.initial_state(1))
        close(y[i, row], alone[0])
        close(stateless[i, row], alone[0])
        assert (y[i, ~row] == 0).all()
        close(further[i], mixer(following[i : i + 1], own)[0][0])
        assert int(state.seen[i]) == int(row.sum())


def check_packed(mixer: Any, rows: list[list[int]]) -> None:
    """Fail unless documents side by side, with padding anywhere, equal each alone; the first goes on from a state."""
    segments = torch.tensor(rows)
    x, history = inputs(*segments.shape), inputs(len(rows), 3, seed=7)
    _, before = mixer(history, mixer.initial_state(len(rows)))
    y, after = mixer(x, before, segments)
    stateless, following = mixer(x, None, segments)[0], inputs(len(rows), 4, seed=9)
    further = mixer(following, after)[0]
    for i, row in enumerate(rows):
        names = list(dict.fromkeys(s for s in row if s >= 0))
        for n, name in enumerate(names):
            mine = segments[i] == name
            document = x[i : i + 1, mine]
            alone = mixer(document)[0]
            close(stateless[i, mine], alone[0])
            if n == 0:
                document = torch.cat((history[i : i + 1], document), 1)
                alone = mixer(document)[0][:, 3:]
            close(y[i, mine], alone[0])
            if n == len(names) - 1:
                whole = mixer(torch.cat((document, following[i : i + 1]), 1))[0]
                close(further[i], whole[0, -4:])


def check_rows(mixer: Any) -> None:
    """Fail unless the order of rows, in inputs and in states, is irrelevant, and rows can be joined."""
    x, order = inputs(3, 5), torch.tensor([2, 0, 0, 1])
    y, state = mixer(x, mixer.initial_state(3))
    close(mixer(x[order])[0], y[order])
    following = inputs(3, 2, seed=4)
    close(mixer(following[order], state.rows(order))[0], mixer(following, state)[0][order])
    longer = mixer(inputs(2, 9, seed=6), mixer.initial_state(2))[1]
    both = torch.cat((following, following[:2]))
    apart = torch.cat((mixer(following, state)[0], mixer(following[:2], longer)[0]))
    close(mixer(both, state.joined(longer))[0], apart)
    close(mixer(both.roll(2, 0), longer.joined(state))[0], apart.roll(2, 0))


def check_nan_stays_in_its_row(mixer: Any) -> None:
    """Fail if NaN in one row reaches another, in outputs, states or gradients of inputs."""
    x = inputs(3, 6)
    x[1, 2] = torch.nan
    x.requires_grad_()
    y, _ = mixer(x, mixer.initial_state(3))
    assert torch.isfinite(y[[0, 2]]).all()
    assert torch.isnan(y[1]).any()
    (dx,) = torch.autograd.grad(y[[0, 2]].sum(), x)
    assert torch.isfinite(dx[[0, 2]]).all()


def check_weights(mixer: Any, segments: Tensor | None = None) -> None:
    """Fail unless the weights, applied to the values, give what the layer puts into its norm and gate."""
    x = inputs(2, 7)
    weights = mixer.weights(x, segments)
    seen: dict[str, Tensor] = {}
    if isinstance(mixer, LinearAttentionLayer):
        hook = mixer.output.register_forward_pre_hook(lambda _, a: seen.update(y=a[0]))
        values = mixer._operands(*mixer._placed(x, None, segments), None, segments).v
    else:
        hook = mixer.o_proj.register_forward_pre_hook(lambda _, a: seen.update(y=a[0]))
        values = mixer.v_proj(x).view(2, 7, -1, mixer.heads.value_dim)
        values = values.repeat_interleave(mixer.heads.n_heads // mixer.heads.n_kv_heads, 2)
    mixer(x, None, segments)
    hook.remove()
    close(torch.einsum("bhts,bshv->bthv", weights, values).flatten(2), seen["y"].flatten(2))
    assert (weights.triu(1) == 0).all()


def fails(law: Callable[..., None], *arguments: Any) -> bool:
    """Whether a law refuses."""
    try:
        law(*arguments)
    except (AssertionError, RuntimeError):
        return True
    return False
