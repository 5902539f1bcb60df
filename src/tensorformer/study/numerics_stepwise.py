"""A formula as eager code evaluates it: operation by operation, each result rounded to the dtype of the input."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.gates import Gate, Scalar, expr
from tensorformer.gates.kernel import kernel
from tensorformer.study.numerics_changes import numbers


def stepwise(form: Gate | Scalar, args: tuple[Tensor, ...]) -> Tensor:
    """Return the formula evaluated operation by operation in the dtype of ``args``, each result rounded to it."""
    if isinstance(form, Gate):
        return stepwise(form.gate, args[:1]) * stepwise(form.value, args[1:])
    formula, x, have = form.expr, args[0], numbers(form)
    names = sorted(str(s) for s in formula.free_symbols - {expr.x})
    printed = kernel(str(formula), ("x", *names))
    values = [torch.tensor(have[n], dtype=x.dtype) if printed.transforms_parameters else have[n] for n in names]
    result = printed.printed(x, *values)
    return result.to(x.dtype).expand(x.shape) if isinstance(result, Tensor) else torch.full_like(x, result)
