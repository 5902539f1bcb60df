"""How far an implementation is from a formula, with rounding taken out."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorformer.study.numerics_inputs import points

# What is smaller is a matter of approximation, not of which function it is: of tanh and exact GELU the difference is
# 1.7e-4 by this measure, of a constant given to six digits 1e-6.
TOLERANCE = 1e-5
# No rounding inside is coarser than bfloat16's; a larger scatter is an error, not noise.
COARSEST = 2.0**-8


@dataclass(frozen=True)
class Misfit:
    """Both relative to the larger of the value and the product of the inputs (each at least 1).

    ``smooth``: the largest mean of a row that its scatter does not explain; ``noise``: the
    scatter that a quarter of the rows exceed.
    ``deviation``: the largest absolute difference in a row that is off, 0 where none is; ``at``: where.
    ``floor``: the smallest ``smooth`` that counts; ``coarse``: the dtype, if not float32 or finer, that scatters so.
    """

    smooth: float
    noise: float
    deviation: float
    at: tuple[float, ...]
    floor: float
    coarse: torch.dtype | None = None

    @property
    def fits(self) -> bool:
        """Whether rounding, in whatever dtype, explains the difference."""
        return self.smooth <= self.tolerance

    @property
    def tolerance(self) -> float:
        """The smallest ``smooth`` that would be seen through the noise."""
        return _tolerance(self.noise, self.floor)


def _tolerance(noise: float, floor: float) -> float:
    return max(floor, 4 * min(noise, COARSEST / 2))


def size(truth: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """Return what an error is measured against."""
    return torch.maximum(truth.abs(), functools.reduce(torch.mul, (a.abs().clamp(min=1) for a in args)))


def misfit(
    got: Tensor,
    truth: Tensor,
    args: tuple[Tensor, ...],
    *,
    scale: Tensor | None = None,
    floor: float = TOLERANCE,
) -> Misfit:
    """Compare outputs at :func:`points`, in float64.

    Args:
        got: of the implementation, (rows, ROW).
        truth: of the formula.
        args: the inputs.
        scale: what an error is measured against, where it is not :func:`size`.
        floor: what is allowed where there is no noise.
    """
    residual = (got - truth) / (size(truth, args) if scale is None else scale)
    lost = ~residual.isfinite()
    if bool(lost.all(1).any()):
        row = int(lost.all(1).int().argmax())
        return Misfit(math.inf, 0.0, math.inf, tuple(a[row, 0].item() for a in args), floor)
    residual = residual.masked_fill(lost, 0.0)
    q = _local(len(args))
    scatter = (residual - (q @ (q.mT @ residual[..., None]))[..., 0]).square().sum(1)
    noise = (scatter / (residual.shape[1] - q.shape[-1])).sqrt()
    mean = residual.mean(1).abs()
    explained = 4 * noise.clamp(max=COARSEST) / math.sqrt(residual.shape[1])
    rows = (mean - explained).clamp(min=0)
    typical = noise.quantile(0.75).item()
    off = rows > _tolerance(typical, floor)
    error = (got - truth).abs().masked_fill(lost | ~off[:, None], 0.0)
    worst = int(error.argmax())
    at = tuple(a.flatten()[worst].item() for a in args)
    return Misfit(rows.max().item(), typical, error.max().item(), at, floor)


@functools.lru_cache(maxsize=4)
def _local(n_inputs: int) -> Tensor:
    """An orthonormal basis, in each row, of quadratics in the inputs: what is left of a residual is not smooth."""
    a = [(p - p.mean(1, keepdim=True)) / p.std(1, keepdim=True) for p in points(n_inputs)]
    columns = [torch.ones_like(a[0]), *a, *(a[i] * a[j] for i in range(n_inputs) for j in range(i + 1))]
    return torch.linalg.qr(torch.stack(columns, -1)).Q
