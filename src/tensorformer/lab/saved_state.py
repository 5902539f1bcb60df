"""States of a model in files that know which model they are of."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path

import msgspec
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tensorformer.config.load import to_toml
from tensorformer.config.schema import Model
from tensorformer.errors import CheckpointError, ShapeError, StorageError
from tensorformer.files import replacing
from tensorformer.lab.checkpoint import learned_tensors
from tensorformer.nn.model import TensorTransformer
from tensorformer.nn.state import State, from_tensors, tensors

CONFIG, WEIGHTS, LOGITS = "model", "weights", "logits"
SAMPLED = 1024  # numbers of each parameter that go into the fingerprint


def save(path: Path, model: TensorTransformer, state: State, logits: Float[Tensor, "b vocab"] | None) -> None:
    """Write a state, and the logits after it if there are any, to a safetensors file, whole or not at all.

    Raises:
        StorageError: it can't be written.
    """
    named = tensors(state) | ({} if logits is None else {LOGITS: logits.contiguous()})
    about = {CONFIG: msgspec.json.encode(model.config, order="sorted").decode(), WEIGHTS: fingerprint(model)}
    with replacing(path) as beside:
        try:
            save_file(named, beside, about)
        except SafetensorError as e:
            raise StorageError(f"{path}: can't be written ({e}); free some space or choose another folder") from None


def load(path: Path, model: TensorTransformer) -> tuple[State, Float[Tensor, "b vocab"] | None]:
    """Return the state that was saved, and the logits after it.

    Raises:
        CheckpointError: the file is missing or damaged, or the state is of another model.
    """
    try:
        with safe_open(path, "pt", device=str(model.embed.weight.device)) as file:
            about = file.metadata() or {}
            _check_model(path, about, model)
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path}: can't be read as a saved state ({e})") from None
    logits = named.pop(LOGITS, None)
    try:
        return from_tensors(named, model.initial_state(0)), logits
    except ShapeError as e:
        raise CheckpointError(f"{path}: {e}") from None


def fingerprint(model: nn.Module) -> str:
    """Return a hash of numbers taken evenly from all that a model has learned: it tells trained weights from others."""
    seen = hashlib.sha256()
    for name, p in learned_tensors(model).items():
        flat = p.detach().flatten()
        some = flat[:: max(1, flat.numel() // SAMPLED)].contiguous()
        seen.update(f"{name} {p.dtype} {list(p.shape)}".encode())
        seen.update(some.view(torch.uint8).cpu().numpy().tobytes())
    return seen.hexdigest()[:16]


def _check_model(path: Path, about: dict[str, str], model: TensorTransformer) -> None:
    try:
        saved = msgspec.json.decode(about[CONFIG], type=Model)
        weights = about[WEIGHTS]
    except (KeyError, msgspec.DecodeError):
        raise CheckpointError(f"{path}: not a saved state, or one of another release") from None
    if saved != model.config:
        changed = difflib.ndiff(to_toml(saved).splitlines(), to_toml(model.config).splitlines())
        words = [line for line in changed if line[:1] in "+-"]
        raise CheckpointError(
            f"{path}: the state is of another model (−: the file's, +: this one's): {'; '.join(words[:6])}"
        )
    if weights != fingerprint(model):
        raise CheckpointError(f"{path}: the state is of a model of this shape with other weights; load those")
