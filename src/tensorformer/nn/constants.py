"""Fixed numbers of a layer, which stay as exact as they are when a model is cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Constants(nn.Module):
    """A module with some numbers that are not trained, float32 or better whatever a model is cast to.

    A bfloat16 has no room for a frequency that is multiplied by thousands of positions.

    Args:
        exact: the numbers.
    """

    values: Tensor

    def __init__(self, exact: list[float]) -> None:
        super().__init__()
        self._exact = exact
        self.register_buffer("values", torch.tensor(exact, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constants:
        super()._apply(fn, recurse)
        if self.values.dtype in (torch.bfloat16, torch.float16):
            self.values = torch.tensor(self._exact, dtype=torch.float32, device=self.values.device)
        return self
