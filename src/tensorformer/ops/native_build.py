"""From C++ to a library in this process: compiled once by the system's compiler, kept, and sealed.

A library's name in the cache is a hash of all that decides it: its source, the compiler and its version, the flags,
and the processor. Beside it lies a seal: the library's own hash, and the dtypes in which it met its laws. Files are
whole or absent, and one builder works at a time; a library that does not match its seal is built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

import msgspec
import torch

from tensorformer.errors import ConfigError
from tensorformer.files import cache_folder, replacing, sha256, write_bytes, write_text

_COMPILERS = ("c++", "g++", "clang++")
# Not -ffast-math, which takes it for granted that nothing is NaN or ∞. These say only that nobody reads errno or the
# floating-point status, for which GCC would keep a choice between two values as a branch.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_MEND = "install one (apt install g++, xcode-select --install), name it in CXX, or write impl='fast'"


class _Refused(Exception):
    """A compiler or the loader said no; the text is its last word."""


class _Seal(msgspec.Struct, frozen=True):
    sha256: str  # of the library
    laws: tuple[str, ...] = ()  # the dtypes in which they held


class _Compiler(NamedTuple):
    command: tuple[str, ...]
    version: str


@final
class Library:
    """The place in the cache of one formula's compiled code, whether or not it is there.

    Args:
        source: C++17.
        name: what errors call it.

    Raises:
        ConfigError: there is no compiler or no place for a cache here.
    """

    def __init__(self, source: str, name: str) -> None:
        reason = why_not()
        if reason is not None:
            raise ConfigError(f"{name}: a native kernel {reason}")
        self._source, self._name = source, name
        self._compiler = _compiler(_command())
        self._attempts = _attempts("clang" in self._compiler.version)
        decides = (source, self._compiler, _FLAGS, self._attempts, _processor())
        key = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
        self.path = library_folder() / f"{key}.so"

    def laws(self) -> tuple[str, ...] | None:
        """Return the dtypes in which its laws held; None where it is absent or damaged."""
        seal = self._read()
        return None if seal is None else seal.laws

    def stamp(self, dtype: str) -> None:
        """Note that its laws held in ``dtype``."""
        seal = self._read() or _Seal(sha256(self.path))
        self._write(_Seal(seal.sha256, tuple(sorted({*seal.laws, dtype}))))

    def load(self) -> ctypes.CDLL:
        """Return it, loaded. It must be whole: a damaged one could end the process.

        Raises:
            ConfigError: it needs something that is not here any more.
        """
        try:
            return ctypes.CDLL(str(self.path))
        except OSError as e:
            raise ConfigError(f"{self._name}: {e}; delete {self.path}, or write impl='fast'") from None

    def build(self) -> None:
        """Compile it, asking less and less of the compiler until it obliges.

        Raises:
            ConfigError: it can't be compiled, or not loaded.
            StorageError: the cache can't be written.
        """
        text, refusals = self.path.with_suffix(".cpp"), []
        write_text(text, self._source)
        for flags in self._attempts:
            with contextlib.suppress(_Refused), replacing(self.path) as beside:
                try:
                    _run([*self._compiler.command, *_FLAGS, str(text), "-o", str(beside), *flags])
                    _try_loading(beside)
                except _Refused as refusal:
                    refusals.append(f"with {' '.join(flags) or 'no other flags'}: {refusal}")
                    raise
                self._write(_Seal(sha256(beside)))
                return
        command = " ".join(self._compiler.command)
        raise ConfigError(f"{self._name}: {command} can't build {text}, {refusals[-1]}; write impl='fast'")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other threads and processes from building it; where files can't be locked, they build the same."""
        import fcntl

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise ConfigError(f"{self.path.parent}: can't be written ({e.strerror}); set TENSORFORMER_CACHE") from None
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _read(self) -> _Seal | None:
        try:
            seal = msgspec.json.decode(self.path.with_suffix(".json").read_bytes(), type=_Seal)
            return seal if sha256(self.path) == seal.sha256 else None
        except (OSError, msgspec.MsgspecError):
            return None

    def _write(self, seal: _Seal) -> None:
        write_bytes(self.path.with_suffix(".json"), msgspec.json.encode(seal))


def why_not() -> str | None:
    """Say why nothing can be compiled here, and what to do about it; None where it can."""
    if sys.platform == "win32":
        return "is built on Linux and macOS only so far: write impl='fast'"
    if _command():
        return None
    if chosen := os.environ.get("CXX"):
        return f"needs a C++ compiler, and CXX={chosen!r} is none: {_MEND}"
    return f"needs a C++ compiler, and none of {', '.join(_COMPILERS)} is on the PATH: {_MEND}"


def library_folder() -> Path:
    """Return the folder of compiled libraries.

    Raises:
        ConfigError: there is no home folder.
    """
    return cache_folder() / "native"


def _command() -> tuple[str, ...]:
    """Return the compiler's command with its full path, and the words CXX gives it; empty where there is none."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:
        return ()  # a quote that nobody closed
    for program, *words in [chosen] if chosen else [[c] for c in _COMPILERS]:
        if found := shutil.which(program):
            return (found, *words)
    return ()


@functools.lru_cache
def _compiler(command: tuple[str, ...]) -> _Compiler:
    try:
        return _Compiler(command, _run([*command, "--version"]))
    except _Refused as refusal:
        raise ConfigError(f"{' '.join(command)} --version fails: {refusal}; {_MEND}") from None


def _attempts(clang: bool) -> tuple[tuple[str, ...], ...]:
    """Return flags to try in turn: this processor's instructions and threads, then one of them, then neither."""
    # Apple's clang on ARM knows its processor by -mcpu only.
    tunes = (
        [("-march=native",), ("-mcpu=native",)] if platform.machine() in ("arm64", "aarch64") else [("-march=native",)]
    )
    threads = _openmp(clang)
    return tuple(t + o for o in ([threads, ()] if threads else [()]) for t in [*tunes, ()])


def _openmp(clang: bool) -> tuple[str, ...]:
    """Return flags that link the OpenMP runtime torch brought, since two in one process fight over the processors."""
    home = Path(torch.__file__).parent
    found = [
        f for folder in ("lib", "../torch.libs") for f in sorted((home / folder).glob("lib*omp*")) if _is_openmp(f)
    ]
    if clang:
        # Clang's code needs the LLVM or Intel runtime.
        found = [f for f in found if not f.name.startswith("libgomp")]
        if not found:
            return ()
    if sys.platform == "darwin":
        return ("-Xpreprocessor", "-fopenmp", *map(str, found[:1]), f"-Wl,-rpath,{found[0].parent}") if found else ()
    # As needed: the compiler's own runtime is then dropped if it has another name. If torch brought none, it uses the
    # system's, and so does this.
    return ("-fopenmp", "-Wl,--as-needed", *map(str, found[:1]))


def _is_openmp(file: Path) -> bool:
    return file.name.startswith(("libgomp", "libomp", "libiomp5")) and (".so" in file.name or ".dylib" in file.name)


@functools.lru_cache
def _processor() -> str:
    """Return what -march=native depends on: libraries in a shared folder must not meet another processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part", "isa"))]
        return "\n".join([platform.machine(), *dict.fromkeys(told)])
    except OSError:
        return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise _Refused(str(e)) from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
        raise _Refused(lines[0])
    return done.stdout


def _try_loading(path: Path) -> None:
    try:
        ctypes.CDLL(str(path))
    except OSError as e:
        raise _Refused(str(e)) from None
