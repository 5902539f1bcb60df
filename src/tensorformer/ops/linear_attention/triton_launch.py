"""The launches of ``triton_kernels.py``: sizes, strides, and which states exist at a time."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tensorformer.ops.linear_attention.blocks import FORGOTTEN, LOG2_E
from tensorformer.ops.linear_attention.plan import pieces
from tensorformer.ops.triton_kernel import OPTIONS, on

KEPT = 1 << 26  # bytes of states between chunks that exist at a time, and backward as many of their gradients

Branches = tuple[Tensor, ...]


class Exponents(NamedTuple):
    """Decays cumulated from the start of each chunk, of base 2: whole octaves, and a fraction of at most a half."""

    octave: Float[Tensor, "n chunks steps"]
    fraction: Float[Tensor, "n chunks steps"]


def exponents(log_decay: Float[Tensor, "b t h"], chunk: int) -> Exponents:
    """Sum decays in float64; past the last step nothing decays."""
    flat = log_decay.transpose(1, 2).flatten(0, 1).double() * LOG2_E
    whole = pad(flat.clamp_min_(FORGOTTEN), (0, -flat.shape[1] % chunk))
    total = whole.unflatten(1, (-1, chunk)).cumsum(2)
    octave = total.round()
    return Exponents(octave.float(), (total - octave).float())


class Launches:
    """The kernels for operands q, k (B, T, H, K_r), v (B, T, H, V) and log_decay (B, T, H), none of them empty."""

    def __init__(self, q: Branches, k: Branches, v: Tensor, log_decay: Tensor | None, chunk: int) -> None:
        self.q, self.k, self.v, self.chunk = q, k, v, chunk
        batch, self.time, self.heads, value = v.shape
        self.count, self.chunks = batch * self.heads, -(-self.time // chunk)
        # A branch alone is the second of two, of which the first has one channel.
        self.sizes = (q[0].shape[3] if len(q) == 2 else 1, q[-1].shape[3], value)
        self.exponents = None if log_decay is None else exponents(log_decay, chunk)
        low = v.dtype == torch.bfloat16
        # Products round a state to bfloat16 where they are of bfloat16: so it can be kept.
        self.kept_dtype = torch.bfloat16 if low else torch.float32
        # float16 has the digits of tf32, but not the range for products of two Gram matrices.
        tf32 = v.dtype == torch.float16 and torch.version.hip is None
        self.kernels = importlib.import_module("tensorformer.ops.linear_attention.triton_kernels")
        # Of the state a program holds so many features × values. float32 is multiplied in registers: fewer.
        self.side = 32 if v.dtype == torch.float32 else 64
        self.constants = {
            "STEPS": chunk,
            "VALUES": min(self.side, _power(value)),
            "DOT": self.kernels.tl.bfloat16 if low else self.kernels.tl.float32,
            "PRECISION": "tf32" if tf32 else "ieee",
            "DEGREE": len(q),
            "DECAY": log_decay is not None,
        }

    @property
    def features(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def windows(self) -> list[tuple[int, int]]:
        """Cut the chunks into runs whose states exist at one time."""
        state = self.count * self.features * self.sizes[2] * self.kept_dtype.itemsize
        return pieces(self.chunks, max(1, KEPT // state))

    def states(self) -> Float[Tensor, "window n k v"]:
        """Return room for the states of any window."""
        shape = (self.windows()[0][1], self.count, self.features, self.sizes[2])
        return torch.empty(shape, dtype=self.kept_dtype, device=self.v.device)

    def carry(self, state: Tensor | None) -> Float[Tensor, "n k v"]:
        """Return a copy of a state (B, H, K, V), zero where there is none, that goes from window to window."""
        shape = (self.count, self.features, self.sizes[2])
        if state is None:
            return torch.zeros(shape, device=self.v.device)
        return torch.empty(shape, device=self.v.device).copy_(state.reshape(shape))

    def advance(self, carry: Tensor, kept: Tensor | None, window: tuple[int, int]) -> None:
        """Carry the state through a window of chunks; keep what it was before each."""
        self._advance(self.k, self.v, carry, kept, window, False)

    def advance_grad(self, dy: Tensor, carry: Tensor, kept: Tensor | None, window: tuple[int, int]) -> None:
        """Carry the state's gradient back through a window of chunks; keep what it was after each."""
        self._advance(self.q, dy, carry, kept, window, True)

    def outputs(self, y: Float[Tensor, "b t h v"], kept: Tensor | None, window: tuple[int, int]) -> None:
        """Write y of a window of chunks into a contiguous tensor."""
        self._launch(
            self.kernels.outputs,
            self._values() * self.count * (window[1] - window[0]),
            [*_strided(*_pair(self.q), *_pair(self.k), self.v), y, _given(kept, y)],
            window,
            {"FEATURES": self.side, "BEFORE": kept is not None, **self._wide()},
            {"num_warps": 4, "num_stages": 2},
        )

    def gradients(
        self,
        dy: Float[Tensor, "b t h v"],
        grads: tuple[Branches, Branches, Tensor],
        kept: Tensor | None,
        d_kept: Tensor | None,
        d_decay: tuple[Tensor, Tensor] | None,
        window: tuple[int, int],
    ) -> None:
        """Write the gradients of q, k and v of a window of chunks into contiguous tensors, and both parts of those of
        the decays, each (N, chunks, steps), where they are wanted."""
        dq, dk, dv = grads
        into, past = (dy, dy) if d_decay is None else d_decay
        self._launch(
            self.kernels.gradients,
            self.count * (window[1] - window[0]),
            [
                *_strided(*_pair(self.q), *_pair(self.k), self.v, dy),
                *_pair(dq), *_pair(dk), dv, _given(kept, dy), _given(d_kept, dy), into, past,
            ],
            window,
            {"BEFORE": kept is not None, "AFTER": d_kept is not None, "D_DECAY": d_decay is not None, **self._wide()},
            {"num_warps": 8, "num_stages": 1},
        )  # fmt: skip

    def _advance(
        self, x: Branches, v: Tensor, carry: Tensor, kept: Tensor | None, window: tuple[int, int], back: bool
    ) -> None:
        self._launch(
            self.kernels.advance,
            self._values() * -(-self.features // self.side) * self.count,
            [*_strided(*_pair(x), v), carry, _given(kept, carry)],
            window,
            {"FEATURES": self.side, "KEPT": kept is not None, "REVERSED": back},
            {"num_warps": 4, "num_stages": 2},
        )

    def _launch(
        self,
        kernel: Any,
        programs: int,
        operands: Sequence[Tensor | int],
        window: tuple[int, int],
        constants: dict[str, Any],
        tuning: dict[str, int],
    ) -> None:
        exponents = self.exponents or (self.v, self.v)
        counts = (*window, self.chunks, self.time, self.count, self.heads, *self.sizes)
        with on(self.v.device):
            kernel[(programs,)](*operands, *exponents, *counts, **self.constants, **constants, **tuning, **OPTIONS)

    def _values(self) -> int:
        return -(-self.sizes[2] // self.constants["VALUES"])

    def _wide(self) -> dict[str, int]:
        return {"WIDE1": _power(self.sizes[0]), "WIDE2": _power(self.sizes[1])}


def _pair(branches: Branches) -> Branches:
    """Return two branches: one alone stands for the first as well, which isn't read or written then."""
    return branches[0], branches[-1]


def _strided(*operands: Tensor) -> list[Tensor | int]:
    """Return every operand with its strides after it."""
    return [argument for x in operands for argument in (x.resolve_neg(), *x.resolve_neg().stride())]


def _given(kept: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor for an argument that the kernel doesn't touch where there is none."""
    return other if kept is None else kept


def _power(size: int) -> int:
    """Return the least power of two that is no less than ``size`` and that a product takes."""
    return max(16, 1 << (size - 1).bit_length())
