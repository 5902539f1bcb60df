"""What any implementation of linear attention must obey: operands, and laws that take an implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorformer.ops.linear_attention import chunked, fast, linear_attention

Op = Callable[..., Any]  # like `linear_attention`: (q, k, v, log_decay, state, chunk) → (y, state)
DECAYS = ("none", "mild", "strong", "resets")


@dataclass
class Operands:
    """The operands of one call; a pair of branches is a tuple, one branch a tuple of one."""

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: Tensor
    log_decay: Tensor | None = None
    state: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        named = {f"q{r}": x for r, x in enumerate(self.q)} | {f"k{r}": x for r, x in enumerate(self.k)}
        optional = {"v": self.v, "log_decay": self.log_decay, "state": self.state}
        return named | {name: x for name, x in optional.items() if x is not None}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Operands:
        new = {name: change(name, x) for name, x in self.named().items()}
        return Operands(
            tuple(new[f"q{r}"] for r in range(len(self.q))),
            tuple(new[f"k{r}"] for r in range(len(self.k))),
            new["v"],
            new.get("log_decay"),
            new.get("state"),
        )

    def to(self, dtype: torch.dtype) -> Operands:
        """Cast as a layer would: decays and state are never below float32."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.map(lambda name, x: x.detach().to(wide if name in ("log_decay", "state") else dtype))

    def steps(self, start: int | None, stop: int | None, state: Tensor | None) -> Operands:
        part = self.map(lambda name, x: x if name == "state" else x[:, start:stop])
        part.state = state
        return part

    def call(self, op: Op, **kwargs: Any) -> Any:
        q, k = (x[0] if len(x) == 1 else x for x in (self.q, self.k))
        return op(q, k, self.v, log_decay=self.log_decay, state=self.state, **kwargs)


def operands(
    time: int,
    key_dims: tuple[int, ...] = (3, 4),
    decay: str = "mild",
    state: bool = False,
    batch: int = 2,
    heads: int = 3,
    value: int = 5,
    seed: int = 0,
) -> Operands:
    """Draw operands in float64: unlike branches, unlike sizes, and decays that differ everywhere."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    log_decay = None
    if decay != "none":
        log_decay = -torch.rand(batch, time, heads, generator=g, dtype=torch.float64)
        scattered = torch.rand(batch, time, heads, generator=g) < 0.1
        if decay == "strong":
            log_decay = torch.where(scattered, 20 * log_decay - 20, log_decay)
        if decay == "resets":
            log_decay = torch.where(scattered, -torch.inf, log_decay)
    width = torch.Size(key_dims).numel()
    return Operands(
        tuple(2 * unit(batch, time, heads, d) for d in key_dims),
        tuple(unit(batch, time, heads, d) for d in key_dims),
        normal(batch, time, heads, value),
        log_decay,
        normal(batch, heads, width, value) if state else None,
    )


def reference(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    kwargs.pop("chunk", None)
    y, s = linear_attention(*args, **kwargs, impl="reference")
    assert s is not None
    return y, s


def run(op: Op, x: Operands, **kwargs: Any) -> dict[str, Tensor]:
    """Return y, the final state and the gradient of every operand, for fixed uneven gradients of both."""
    leaves = x.map(lambda _, t: t.detach().clone().requires_grad_())
    y, s = leaves.call(op, **kwargs)
    g = torch.Generator().manual_seed(1)
    dy, ds = (torch.randn(o.shape, generator=g, dtype=torch.float64) for o in (y, s))
    named = leaves.named()
    found = torch.autograd.grad([y, s], list(named.values()), [dy.to(y.dtype), ds.to(s.dtype)])
    grads = {f"d_{name}": grad for name, grad in zip(named, found, strict=True)}
    return {"y": y.detach(), "final state": s.detach(), **grads}


def assert_near(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Compare relative to the largest entry of each tensor, which is never taken as less than one."""
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert found[name].shape == value.shape, name
        if value.numel():
            error = (found[name] - value).abs().max() / value.abs().max().clamp_min(1)
            assert error <= tolerance, f"{name} is off by {error:.1e}"


@contextmanager
def small_tiles(tile: int = 4, chunk: int = 8) -> Iterator[None]:
    """Shrink the tiles, so that small operands, quick in the reference, cross many of their edges."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chunked, fast):
            patch.setattr(module, "TILE", tile)
        patch.setattr(chunked, "CHUNK", chunk)
        patch.setattr(fast, "WORKING_SET", 4 * tile * tile * 8)
        yield


# The laws.


def equals_the_recurrence(op: Op, x: Operands, **kwargs: Any) -> None:
    assert_near(run(op, x, **kwargs), run(reference, x))


def equals_the_explicit_form(op: Op, x: Operands, **kwargs: Any) -> None:
    """y = (Φ(Q) Φ(K)ᵀ ∘ D) V + decayed Φ(Q) S₀, with D a lower triangle of explicit products of decays."""

    def kronecker(branches: tuple[Tensor, ...]) -> Tensor:
        rows = [x.transpose(1, 2).flatten(0, 2) for x in branches]
        phi = rows[0] if len(rows) == 1 else torch.stack([torch.kron(a, b) for a, b in zip(*rows, strict=True)])
        b, t, h, _ = branches[0].shape
        return phi.view(b, h, t, -1)

    b, t, h, _ = x.v.shape
    phi_q, phi_k, v = kronecker(x.q), kronecker(x.k), x.v.transpose(1, 2)
    decay = torch.ones(b, h, t, dtype=v.dtype) if x.log_decay is None else x.log_decay.exp().transpose(1, 2)
    between = torch.zeros(b, h, t, t, dtype=v.dtype)
    for i in range(t):
        for j in range(i + 1):
            between[:, :, i, j] = decay[:, :, j + 1 : i + 1].prod(2)
    y = (phi_q @ phi_k.mT * between) @ v
    s = (phi_k * between[:, :, -1, :, None]).mT @ v
    if x.state is not None:
        y = y + phi_q @ x.state * decay.cumprod(2)[..., None]
        s = s + x.state * decay.prod(2)[..., None, None]
    found_y, found_s = x.call(op, **kwargs)
    assert_near({"y": found_y, "final state": found_s}, {"y": y.transpose(1, 2), "final state": s})


def prefix_then_suffix_is_the_whole(op: Op, x: Operands, cut: int, **kwargs: Any) -> None:
    y, s = x.call(op, **kwargs)
    head, between = x.steps(None, cut, x.state).call(op, **kwargs)
    tail, after = x.steps(cut, None, between).call(op, **kwargs)
    assert_near({"y": torch.cat([head, tail], 1), "final state": after}, {"y": y, "final state": s})


def is_causal(op: Op, x: Operands, step: int, **kwargs: Any) -> None:
    """Whatever comes after a step leaves its output as it was; its own value does not."""

    def changed(start: int, only: str | None = None) -> Tensor:
        def change(name: str, t: Tensor) -> Tensor:
            if name == "state" or only not in (None, name):
                return t
            t = t.clone()
            t[:, start:] = t[:, start:] * 1.5 - 0.25
            return t

        return x.map(change).call(op, **kwargs)[0]

    y = x.call(op, **kwargs)[0]
    assert_near({"y": changed(step + 1)[:, : step + 1]}, {"y": y[:, : step + 1]})
    moved = (changed(step, only="v")[:, step] - y[:, step]).abs()
    assert moved.min() > 1e-9, "a step does not see itself"


def rows_are_independent(op: Op, x: Operands, **kwargs: Any) -> None:
    """NaN in the first row of the batch reaches no other, in outputs or gradients."""

    def poison(name: str, t: Tensor) -> Tensor:
        t = t.clone()
        t[0] = torch.nan
        return t

    clean, poisoned = run(op, x, **kwargs), run(op, x.map(poison), **kwargs)
    assert_near({n: t[1:] for n, t in poisoned.items()}, {n: t[1:] for n, t in clean.items()})
    assert poisoned["y"][0].isnan().all()


def keeps_the_error_budget(op: Op, x: Operands, dtype: torch.dtype, **kwargs: Any) -> None:
    """err ≤ 2·(err of the reference in that dtype + eps·max|truth|), for outputs and every gradient."""
    rounded = x.to(dtype)
    truth = run(reference, rounded.to(torch.float64))
    found, plain = run(op, rounded, **kwargs), run(reference, rounded)
    for name, value in truth.items():
        scale = value.abs().max() * torch.finfo(dtype).eps
        error, allowed = ((t[name].double() - value).abs().max() for t in (found, plain))
        assert error <= 2 * (allowed + scale), f"{name}: {error / scale:.2f} eps, reference {allowed / scale:.2f}"
