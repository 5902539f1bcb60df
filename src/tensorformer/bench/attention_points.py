"""The points of linear attention that are measured, operands for them, and the laws they must hold first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorformer.ops.linear_attention import linear_attention
from tensorformer.ops.linear_attention.plan import Decayed, Update

# Of the whole result, root mean square, against the recurrence in float64. Measured: 4e-7 and 4e-3 at the most.
ALLOWED = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
_TIME = 257  # steps on which the laws are tried: two chunks and one step more


@dataclass(frozen=True)
class Point:
    """One way of linear attention: heads, features a branch, values, decay and update."""

    name: str
    heads: int
    key_dims: tuple[int, ...]
    value_dim: int
    decay: Decayed = "none"
    update: Update = "additive"

    def __str__(self) -> str:
        return f"{self.name} ({self.heads} heads of {'×'.join(map(str, self.key_dims))}→{self.value_dim})"

    def operands(self, time: int, dtype: torch.dtype) -> Operands:
        """Draw operands: keys and queries of length one, as the delta rule needs them, and decays of 0.9 to 1."""
        shape = (1, time, self.heads)

        def unit(width: int) -> Tensor:
            return torch.nn.functional.normalize(torch.randn(*shape, width), dim=3).to(dtype)

        q, k = (tuple(unit(width) for width in self.key_dims) for _ in range(2))
        v = torch.randn(*shape, self.value_dim).to(dtype)
        widths = {"none": (), "head": ((),), "channel": tuple((width,) for width in self.key_dims)}[self.decay]
        decays = tuple(torch.rand(*shape, *width) * math.log(0.9) for width in widths)
        return Operands(q, k, v, decays, torch.rand(shape) if self.update == "delta" else None, self.update)


@dataclass(frozen=True)
class Operands:
    """The operands of one call."""

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: Tensor
    log_decay: tuple[Tensor, ...]
    beta: Tensor | None
    update: Update

    def leaves(self) -> list[Tensor]:
        """Return every operand that is differentiated."""
        return [*self.q, *self.k, self.v, *self.log_decay, *(() if self.beta is None else (self.beta,))]

    def require_gradients(self) -> Operands:
        for x in self.leaves():
            x.requires_grad_()
        return self

    def to(self, dtype: torch.dtype) -> Operands:
        q, k, decays = (tuple(x.to(dtype) for x in several) for several in (self.q, self.k, self.log_decay))
        return Operands(q, k, self.v.to(dtype), decays, None if self.beta is None else self.beta.to(dtype), self.update)

    def steps(self, start: int, stop: int) -> Operands:
        q, k, decays = (tuple(x[:, start:stop] for x in several) for several in (self.q, self.k, self.log_decay))
        beta = None if self.beta is None else self.beta[:, start:stop]
        return Operands(q, k, self.v[:, start:stop], decays, beta, self.update)

    def attend(
        self, state: Tensor | None = None, final_state: bool = False, impl: str = "auto"
    ) -> tuple[Tensor, Tensor | None]:
        """Call the operator."""
        q, k = _branches(self.q), _branches(self.k)
        decay = _branches(self.log_decay) if self.log_decay else None
        beta, update = self.beta, self.update
        return linear_attention(
            q, k, self.v, decay, state, impl=impl, beta=beta, update=update, final_state=final_state
        )

    def gradients(self, dy: Tensor) -> tuple[Tensor, ...]:
        """Run forward and backward, as in training: without a final state."""
        return torch.autograd.grad(self.attend()[0], self.leaves(), dy)


def _branches(several: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
    return several[0] if len(several) == 1 else (several[0], several[1])


def violations(point: Point, dtype: torch.dtype) -> Iterator[str]:
    """Yield which results of `point` are further from the recurrence in float64 than `ALLOWED`."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        x = point.operands(_TIME, dtype)
        dy = torch.randn_like(x.v)
    exact = x.to(torch.float64)
    with torch.no_grad():
        before = x.steps(0, _TIME - 1).attend(final_state=True)[1]
        _, after = exact.attend(final_state=True, impl="reference")
        step, stepped = x.steps(_TIME - 1, _TIME).attend(before, final_state=True)
    assert stepped is not None
    assert after is not None
    exact.require_gradients()
    y, _ = exact.attend(impl="reference")
    wanted = torch.autograd.grad(y, exact.leaves(), dy.double())
    x.require_gradients()
    found = x.gradients(dy)
    results = {"output": (x.attend()[0], y), "a token more": (step, y[:, -1:]), "the state after it": (stepped, after)}
    results |= {f"gradient {i}": pair for i, pair in enumerate(zip(found, wanted, strict=True))}
    for name, (mine, theirs) in results.items():
        off = ((mine.double() - theirs).norm() / theirs.norm()).item()
        if not off <= ALLOWED[dtype]:
            yield f"{name} is off by {off:.1e} of its size"
