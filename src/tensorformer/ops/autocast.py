"""Which dtype a region of autocast asks for."""

from __future__ import annotations

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which products on ``device`` are now to be taken; None outside of autocast.

    Some devices, "meta" among them, have no autocast, and raise when they are asked.
    """
    kind = device.type
    active = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if active else None
