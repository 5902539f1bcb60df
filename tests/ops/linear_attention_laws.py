"""What any implementation of linear attention must obey: operands, and laws that take an implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorformer.ops.linear_attention import chunked, fast, linear_attention, plan

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
    channel_decay: tuple[Tensor, ...] = ()
    beta: Tensor | None = None
    update: str = "additive"
    segments: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        named = {f"q{r}": x for r, x in enumerate(self.q)} | {f"k{r}": x for r, x in enumerate(self.k)}
        named |= {f"log_decay{r}": x for r, x in enumerate(self.channel_decay)}
        optional = {"v": self.v, "log_decay": self.log_decay, "state": self.state, "beta": self.beta}
        return named | {name: x for name, x in optional.items() if x is not None}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Operands:
        new = {name: change(name, x) for name, x in self.named().items()}
        return Operands(
            tuple(new[f"q{r}"] for r in range(len(self.q))),
            tuple(new[f"k{r}"] for r in range(len(self.k))),
            new["v"],
            new.get("log_decay"),
            new.get("state"),
            tuple(new[f"log_decay{r}"] for r in range(len(self.channel_decay))),
            new.get("beta"),
            self.update,
            self.segments,
        )

    def to(self, dtype: torch.dtype) -> Operands:
        """Cast as a layer would: decays and state are never below float32."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.map(lambda name, x: x.detach().to(dtype if name[0] in "qkv" else wide))

    def steps(self, start: int | None, stop: int | None, state: Tensor | None) -> Operands:
        part = self.map(lambda name, x: x if name == "state" else x[:, start:stop])
        part.state = state
        part.segments = None if self.segments is None else self.segments[:, start:stop]
        return part

    def rows(self, chosen: Any) -> Operands:
        """Return these rows of the batch."""
        part = self.map(lambda _, x: x[chosen])
        part.segments = None if self.segments is None else self.segments[chosen]
        return part

    def call(self, op: Op, **kwargs: Any) -> Any:
        q, k, decays = (x[0] if len(x) == 1 else x for x in (self.q, self.k, self.channel_decay))
        decay = decays if self.channel_decay else self.log_decay
        options = {"beta": self.beta, "update": self.update, "segments": self.segments}
        given = {name: x for name, x in options.items() if x is not None and x != "additive"}
        return op(q, k, self.v, log_decay=decay, state=self.state, **given, **kwargs)


def operands(
    time: int,
    key_dims: tuple[int, ...] = (3, 4),
    decay: str = "mild",
    state: bool = False,
    batch: int = 2,
    heads: int = 3,
    value: int = 5,
    seed: int = 0,
    channel: bool = False,
    update: str = "additive",
    groups: int = 1,
) -> Operands:
    """Draw operands in float64: unlike branches, unlike sizes, and decays and betas that differ everywhere.

    `heads` are those of q and k, `groups` how many heads of v share one. With `channel` every channel decays on
    its own. The delta rule gets a beta.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    def decays(*shape: int) -> Tensor:
        log_decay = -torch.rand(*shape, generator=g, dtype=torch.float64)
        scattered = torch.rand(*shape, generator=g) < 0.1
        if decay == "strong":
            log_decay = torch.where(scattered, 20 * log_decay - 20, log_decay)
        if decay == "resets":
            log_decay = torch.where(scattered, -torch.inf, log_decay)
        return log_decay

    many = heads * groups
    log_decay = decays(batch, time, many) if decay != "none" and not channel else None
    width = torch.Size(key_dims).numel()
    x = Operands(
        tuple(2 * unit(batch, time, heads, d) for d in key_dims),
        tuple(unit(batch, time, heads, d) for d in key_dims),
        normal(batch, time, many, value),
        log_decay,
        normal(batch, many, width, value) if state else None,
        update=update,
    )
    if channel:
        x.channel_decay = tuple(decays(batch, time, many, d) for d in key_dims)
    if update == "delta":
        x.beta = torch.rand(batch, time, many, generator=g, dtype=torch.float64)
    return x


def reference(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    kwargs.pop("chunk", None)
    y, s = linear_attention(*args, **kwargs, impl="reference")
    assert s is not None
    return y, s


def run(op: Op, x: Operands, **kwargs: Any) -> dict[str, Tensor]:
    """Return y, the final state and the gradient of every operand, for fixed uneven gradients of both."""
    return run_with(op, x, None, None, **kwargs)


def uneven(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_with(op: Op, x: Operands, dy: Tensor | None, ds: Tensor | None, **kwargs: Any) -> dict[str, Tensor]:
    """Like `run`, for these gradients of y and of the final state."""
    leaves = x.map(lambda _, t: t.detach().clone().requires_grad_())
    y, s = leaves.call(op, **kwargs)
    dy, ds = uneven(y.shape, 1) if dy is None else dy, uneven(s.shape, 2) if ds is None else ds
    named = leaves.named()
    found = torch.autograd.grad([y, s], list(named.values()), [dy.to(y.dtype), ds.to(s.dtype)])
    grads = {f"d_{name}": grad for name, grad in zip(named, found, strict=True)}
    return {"y": y.detach(), "final state": s.detach(), **grads}


@dataclass(frozen=True)
class Point:
    """One of the twelve: the feature degree, what a decay belongs to, and the update."""

    degree: int
    decay: str
    update: str

    def __str__(self) -> str:
        return f"{self.degree}-{self.decay}-{self.update}"

    def operands(self, time: int, **kwargs: Any) -> Operands:
        kind = kwargs.pop("kind", "mild")
        return operands(
            time,
            kwargs.pop("key_dims", (5,) if self.degree == 1 else (3, 4)),
            "none" if self.decay == "none" else kind,
            channel=self.decay == "channel",
            update=self.update,
            **kwargs,
        )


POINTS = [
    Point(degree, decay, update)
    for degree in (1, 2)
    for decay in ("none", "head", "channel")
    for update in ("additive", "delta")
]


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
        patch.setattr(plan, "BLOCK", chunk)
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


def padded_rows_are_rows_alone(op: Op, x: Operands, **kwargs: Any) -> None:
    """Padding at either end, whatever it holds, changes nothing: outputs, final states and every gradient."""
    batch, time = x.v.shape[:2]
    lengths = [max(1, time - 3 * row) for row in range(batch)]
    for lead in (0, 2):
        for only in (slice(None), slice(batch - 1, batch)):
            chosen = x.rows(only)
            chosen.segments = torch.full(chosen.v.shape[:2], -1)
            for row, length in enumerate(lengths[only]):
                chosen.segments[row, lead : lead + length] = 7
            padding = chosen.segments < 0

            def poison(name: str, t: Tensor, padding: Tensor = padding) -> Tensor:
                return t if name == "state" else t.masked_fill(padding.view(*padding.shape, *(1,) * (t.ndim - 2)), 1e3)

            found = run(op, chosen.map(poison), **kwargs)
            assert not found["y"][padding].any(), "padding has an output"
            for row, length in enumerate(lengths[only]):
                steps = slice(lead, min(lead + length, time))
                alone = chosen.rows(slice(row, row + 1)).steps(steps.start, steps.stop, None)
                alone.state = None if chosen.state is None else chosen.state[row : row + 1]
                alone.segments = None
                dy = uneven(found["y"].shape, 1)[row : row + 1, steps]
                ds = uneven(found["final state"].shape, 2)[row : row + 1]
                want = run_with(reference, alone, dy, ds)
                kept = {
                    name: t[row : row + 1] if name in ("final state", "d_state") else t[row : row + 1, steps]
                    for name, t in found.items()
                }
                assert_near(kept, want)


def packed_documents_are_documents_alone(op: Op, x: Operands, lengths: list[int], **kwargs: Any) -> None:
    """Documents end to end in one row, with padding between, are documents in rows of their own."""
    assert x.segments is None
    ids = torch.repeat_interleave(torch.arange(len(lengths)) % 2 * 5, torch.tensor(lengths))
    x.segments = ids.expand(x.v.shape[:2]).clone()
    gap = sum(lengths[:2])
    x.segments[:, gap - 1 : gap] = -1
    found_y, found_s = x.call(op, **kwargs)
    start, want, state = 0, [], x.state
    last = None
    for length in lengths:
        alone = x.steps(start, start + length, state)
        y, last = alone.call(reference)
        want.append(y)
        start, state = start + length, None
    assert last is not None
    assert_near({"y": found_y, "final state": found_s}, {"y": torch.cat(want, 1), "final state": last})


def batch_order_is_irrelevant(op: Op, x: Operands, **kwargs: Any) -> None:
    order = torch.randperm(x.v.shape[0])
    y, s = x.call(op, **kwargs)
    assert_near(
        dict(zip(("y", "s"), x.rows(order).call(op, **kwargs), strict=True)), {"y": y[order], "s": s[order]}, 1e-13
    )
