"""Checkpoints: folders of safetensors with checksums, whole or absent."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from tensorformer.errors import CheckpointError
from tensorformer.files import sha256

MODEL, OPTIMIZERS, META = "model.safetensors", "optimizers.safetensors", "checkpoint.json"


class Meta(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself."""

    step: int  # optimiser steps taken
    seconds: float  # of training so far
    sha256: dict[str, str]


def save(
    run_folder: Path, step: int, seconds: float, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Path:
    """Write ``checkpoint-<step>`` with the weights and all that is needed to continue bit for bit."""
    target = run_folder / f"checkpoint-{step}"
    beside = run_folder / f".checkpoint-{step}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        save_file({name: t.detach().contiguous() for name, t in learned_tensors(model).items()}, beside / MODEL)
        save_file(_optimizer_tensors(model, optimizers), beside / OPTIMIZERS)
        meta = Meta(step, seconds, {name: sha256(beside / name) for name in (MODEL, OPTIMIZERS)})
        (beside / META).write_bytes(msgspec.json.encode(meta))
        for name in (MODEL, OPTIMIZERS, META):
            with (beside / name).open("rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"{target}: can't be written ({e}); free some space and run the same command") from None
    return target


def load(checkpoint: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer] | None = None) -> Meta:
    """Fill the model, and the optimisers if given, from a checkpoint whose checksums hold.

    Raises:
        CheckpointError: a file is missing or damaged, or holds another model.
    """
    meta = _read_meta(checkpoint)
    wanted = (MODEL, OPTIMIZERS) if optimizers is not None else (MODEL,)
    for name in wanted:
        file = checkpoint / name
        if not file.is_file() or sha256(file) != meta.sha256.get(name):
            raise CheckpointError(f"{file}: damaged (its checksum differs); remove {checkpoint} to go on without it")
    weights, tensors = load_file(checkpoint / MODEL), learned_tensors(model)
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in tensors.items()}:
        raise CheckpointError(f"{checkpoint}: holds another model than the run's config.toml describes")
    with torch.no_grad():
        for name, t in tensors.items():
            t.copy_(weights[name])
    if optimizers is not None:
        _restore_optimizers(load_file(checkpoint / OPTIMIZERS), dict(model.named_parameters()), optimizers)
    return meta


def latest(run_folder: Path) -> Path | None:
    """Return the checkpoint of the highest step."""
    return max(_all(run_folder), key=_step, default=None)


def at(run_folder: Path, step: int) -> Path | None:
    """Return the checkpoint of that step, if it is there."""
    path = run_folder / f"checkpoint-{step}"
    return path if (path / META).is_file() else None


def prune(run_folder: Path, keep: Collection[int], newest: int) -> None:
    """Remove all checkpoints but the ``newest`` last ones and those at the steps to ``keep``."""
    for path in sorted(_all(run_folder), key=_step)[: -newest or None]:
        if _step(path) not in keep:
            shutil.rmtree(path)
    for leftover in run_folder.glob(".checkpoint-*.part"):
        shutil.rmtree(leftover)


def _all(run_folder: Path) -> list[Path]:
    return [p for p in run_folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _read_meta(checkpoint: Path) -> Meta:
    try:
        return msgspec.json.decode((checkpoint / META).read_bytes(), type=Meta)
    except (OSError, msgspec.DecodeError) as e:
        raise CheckpointError(
            f"{checkpoint / META}: unreadable ({e}); remove {checkpoint} to go on without it"
        ) from None


def learned_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all that a model has learned: its parameters, and the biases that balance experts without a loss."""
    kept = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if name in kept}}


def _optimizer_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{i}/{names[p]}/{key}": value.contiguous()
        for i, optimizer in enumerate(optimizers)
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def _restore_optimizers(
    tensors: dict[str, torch.Tensor], parameters: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer]
) -> None:
    for path, value in tensors.items():
        i, name, key = path.split("/")
        p = parameters[name]
        optimizers[int(i)].state[p][key] = value.to(p.device)  # step counts too: fused AdamW keeps them there
