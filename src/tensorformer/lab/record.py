"""What a run leaves in its folder: its configuration, its metrics, its result."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from tensorformer.config.load import differences, run_from_toml, run_hash, to_toml
from tensorformer.config.schema import Run
from tensorformer.errors import CheckpointError, ConfigError, StorageError
from tensorformer.files import write_bytes, write_text
from tensorformer.lab import checkpoint
from tensorformer.lab.results import ExpertLayer, Point, SeedResult

CONFIG, IDENTITY, METRICS, TIMING = "config.toml", "identity.json", "metrics.jsonl", "timing.jsonl"
RESULT, DIVERGED = "result.json", "diverged"


class Identity(msgspec.Struct, frozen=True):
    """What must be the same for a run to go on in a folder."""

    run: str  # hash of the configuration
    corpus: str  # fingerprint of the tokens


class Result(msgspec.Struct, frozen=True):
    """What a finished run measured."""

    loss: float  # nats per token, or per answer of a probe, on the validation part
    bits_per_byte: float | None  # None: a probe, which has no bytes
    tuning_loss: float | None  # nats per token, on the part that only learning rates are chosen on; None: not asked
    context_losses: dict[int, float]  # tokens of context -> nats per token
    seconds: float
    context_accuracies: dict[int, float] = {}  # of a probe's answers, by tokens of context


def check_claim(folder: Path, run: Run, fingerprint: str) -> None:
    """Refuse a folder in which another run has been trained; nothing is written.

    Raises:
        CheckpointError: another configuration or corpus was trained there.
    """
    if not (folder / IDENTITY).exists() or not _was_trained_in(folder):
        return
    old = _decode(folder / IDENTITY, Identity)
    mend = "take another name in the recipe, or remove the folder"
    if old.run != run_hash(run):
        try:
            before = read_run(folder)
            # A release that adds a key changes hashes, but not what was trained.
            changed = "; ".join(differences(before, run)[:3]) if before != run else ""
        except CheckpointError:
            changed = "its config.toml can't be read"
        if changed:
            raise CheckpointError(f"{folder}: holds a run with another configuration ({changed}); {mend}")
    if old.corpus != fingerprint:
        raise CheckpointError(f"{folder}: holds a run on other text (the corpus has changed since); {mend}")


def claim(folder: Path, run: Run, fingerprint: str) -> None:
    """Make the folder this run's, or make sure that it is already; see ``check_claim``."""
    check_claim(folder, run, fingerprint)
    if not (folder / IDENTITY).exists() or not _was_trained_in(folder):
        write_text(folder / CONFIG, to_toml(run))
        (folder / DIVERGED).unlink(missing_ok=True)
        write_bytes(folder / IDENTITY, msgspec.json.encode(Identity(run_hash(run), fingerprint)))


def _was_trained_in(folder: Path) -> bool:
    return checkpoint.latest(folder) is not None or (folder / RESULT).exists()


def mark_diverged(folder: Path) -> None:
    """Remember that the run diverged; it takes no more than the first look at a learning rate to know."""
    write_text(folder / DIVERGED, "")


def diverged(folder: Path) -> bool:
    """Return whether the run is known to diverge."""
    return (folder / DIVERGED).exists()


@contextlib.contextmanager
def locked(folder: Path, patience: float = 30.0) -> Iterator[None]:
    """Hold a run folder against other processes; a killed process lets go of it by itself.

    Args:
        folder: the run's.
        patience: seconds to wait, which a process that lost its parent needs to finish its step and leave.

    Raises:
        CheckpointError: another process is still training there.
    """
    try:
        import fcntl
    except ImportError:  # Windows: there is nothing to hold it with
        yield
        return
    with (folder / ".lock").open("w") as lock:
        waited = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited >= patience:
                    raise CheckpointError(
                        f"{folder}: another process is training here; wait for it or stop it"
                    ) from None
                time.sleep(0.2)
                waited += 0.2
        yield


def read_run(folder: Path) -> Run:
    """Return the configuration that a run folder records."""
    if not (folder / IDENTITY).is_file():
        raise CheckpointError(f"{folder}: not a run (no {IDENTITY}); name a folder like runs/demo/bilinear/seed-0")
    try:
        return run_from_toml((folder / CONFIG).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as e:
        raise CheckpointError(f"{folder / CONFIG}: unreadable ({e})") from None


def read_result(folder: Path) -> Result | None:
    """Return what a run measured, or None if it has not finished."""
    return _decode(folder / RESULT, Result) if (folder / RESULT).exists() else None


def finished(folder: Path, lengths: Collection[int], tuning: bool) -> Result | None:
    """Return what a run measured, if it has finished and measured all that is asked for.

    Args:
        folder: the run's.
        lengths: context lengths in tokens; others would not do, for the longest decides on which text all are measured.
        tuning: whether the loss on the tuning part is asked for.
    """
    result = read_result(folder)
    if result is None or set(lengths) != result.context_losses.keys() or (tuning and result.tuning_loss is None):
        return None
    return result


def write_result(folder: Path, result: Result) -> None:
    """Write what a run measured."""
    write_bytes(folder / RESULT, msgspec.json.encode(result))


def seed_result(folder: Path, seed: int) -> SeedResult:
    """Return a finished run as the report wants it."""
    result = read_result(folder)
    if result is None:
        raise CheckpointError(f"{folder}: the run has not finished")
    clock = {row["step"]: row["seconds"] for row in read_rows(folder / TIMING)}
    curve = [
        Point(
            row["step"],
            row["tokens"],
            clock.get(row["step"], 0.0),
            row["validation_loss"],
            row.get("validation_accuracy"),
            msgspec.convert(row.get("experts", []), list[ExpertLayer]),
        )
        for row in read_rows(folder / METRICS)
        if "validation_loss" in row
    ]
    return SeedResult(seed, result.loss, result.bits_per_byte, result.context_losses, curve, result.context_accuracies)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file; a last line that a kill cut short is left out."""
    if path.exists():
        for line in path.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    raise CheckpointError(f"{path}: damaged; remove the run's folder to train it anew") from None


class Log:
    """A JSONL file that is only appended to, after the rows past a step were dropped once on resuming.

    Args:
        path: the file.
        step: rows of later steps are of a run that was killed after its last checkpoint, and will come again.
        rows_before: where a branched run takes its first rows from.
    """

    def __init__(self, path: Path, step: int, rows_before: Path | None = None) -> None:
        kept = [row for row in read_rows(rows_before or path) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def __call__(self, **row: float | list[ExpertLayer]) -> None:
        """Append a row and hand it to the operating system."""
        try:
            self._file.write(json.dumps(msgspec.to_builtins(row)) + "\n")
            self._file.flush()
        except OSError as e:
            raise StorageError.at(self._file.name, e) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _decode(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as e:
        raise CheckpointError(f"{path}: unreadable ({e}); remove the run's folder to train it anew") from None
