"""Time on a GPU, by its own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

WARM_UPS = 3
_FLUSH = 1 << 30  # bytes written between two works: more than any L2 cache holds


def cuda_seconds(works: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each work on ``device``, all timed in turn, each with a cold L2 cache.

    Python launches a work while the flush is being written (a quarter of a millisecond), so that it is not timed too.
    """
    with torch.cuda.device(device):
        flush = torch.empty(_FLUSH, dtype=torch.int8, device=device)
        order = list(works)
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
        for round_ in range(WARM_UPS + rounds):
            for name in order if round_ % 2 else reversed(order):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                began.record()
                works[name]()
                ended.record()
                if round_ >= WARM_UPS:
                    marks[name].append((began, ended))
        torch.cuda.synchronize(device)
    return {
        name: statistics.median(began.elapsed_time(ended) for began, ended in pairs) / 1000
        for name, pairs in marks.items()
    }
