"""Where a run computes, in what precision, and how much memory it took."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import cast

import torch
from torch import nn

from tensorformer.config.schema import Train
from tensorformer.errors import ConfigError

PROC = Path("/proc/self")


def pick(name: str) -> torch.device:
    """Return the device that ``"auto"``, ``"cpu"``, ``"cuda"``, … names here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise ConfigError(f"device {name!r} can't be used here: {str(e).splitlines()[0]}") from None
    return device


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a forward pass runs."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def compiled(model: nn.Module, train: Train, device: torch.device) -> nn.Module:
    """Return the model to call in training: compiled by torch if the recipe says so.

    Raises:
        ConfigError: there is no C++ compiler, which the first call would need.
    """
    if not train.compile:
        return model
    if device.type == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise ConfigError("$.train.compile: needs a C++ compiler and finds none; install g++ or leave it out")
    return cast(nn.Module, torch.compile(model))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(device: str) -> int:
    """Return how many runs fit side by side: a core each, or one on an accelerator."""
    return cores() if pick(device).type == "cpu" else 1


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak begin anew from what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif PROC.exists():
        (PROC / "clear_refs").write_text("5")


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process (or its share of the accelerator) holds now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _proc_status("VmRSS")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this process (or its share of the accelerator) ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _proc_status("VmHWM")


def _proc_status(key: str) -> int:
    # Not getrusage: its maximum can't be reset, and on Linux it is inherited from the parent process.
    if PROC.exists():
        for line in (PROC / "status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0
