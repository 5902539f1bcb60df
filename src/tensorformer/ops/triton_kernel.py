"""What Triton kernels with a gate in them share: whether they can run here, the gate's text, and how text is built."""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.gates import Gate, Scalar

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Said outright, as Triton 3.9 warns where it isn't that its default will change.
OPTIONS = {"enable_fp_fusion": True}


class GateText(NamedTuple):
    """The part of a kernel that a gate decides.

    Args:
        numbers, tensors: names of the parameters in the formula: variables of these names hold their values.
        lines: Triton that computes ``h`` (and ``dg``, ``du``) from ``g`` and ``u`` in float32.
    """

    numbers: tuple[str, ...]
    tensors: tuple[str, ...]
    lines: tuple[str, ...]


_TEXTS: dict[tuple[Any, ...], GateText] = {}


def gate_text(gate: Gate, backward: bool = False) -> GateText:
    """Return the text of ``gate``, printed once for each formula.

    Raises:
        GateError: the formula uses a function that has no Triton form.
    """
    key = (backward, *(_formula(s) for s in (gate.gate, gate.value)))
    if key not in _TEXTS:
        used = {s.name for s in gate.expr.free_symbols}
        given = {n: v for n, v in gate.parameters.items() if n in used}
        tensors = tuple(n for n, v in given.items() if isinstance(v, Tensor))
        numbers = tuple(n for n in given if n not in tensors)
        _TEXTS[key] = GateText(numbers, tensors, tuple(gate.triton_body(backward)))
    return _TEXTS[key]


def _formula(scalar: Scalar) -> tuple[Any, ...]:
    """Return all that decides the text: the formulas, and which of them the parameters choose."""
    kinds = {n: "tensor" if isinstance(v, Tensor) else bool(v) for n, v in scalar.parameters.items()}
    return scalar.formula, scalar.without, tuple(kinds.items())


def build(source: str, name: str) -> Any:
    """Return the ``triton.jit`` function ``name`` written in ``source``, in which ``triton`` and ``tl`` are known."""
    import triton
    import triton.language as tl

    # Triton reads a kernel's text back through inspect, and inspect finds it here: nothing is written to disk.
    file = f"<tensorformer Triton {name} {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def why_not(gate: Gate, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why a kernel with ``gate`` in it can't run, and what to do about it; None where it can."""
    if dtype not in DTYPES:
        return f"computes in float32, which is too little for {dtype}: write impl='reference'"
    if reason := why_not_here(device):
        return reason
    try:
        gate_text(gate, backward=True)
    except GateError as error:
        return str(error)
    return None


def why_not_here(device: torch.device) -> str | None:
    """Say why no kernel can run on a device, and what to do about it; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton: pip install 'tensorformer[gpu]'"
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        return "needs a CUDA device, or TRITON_INTERPRET=1 set before the process starts"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or more"
    return None


def interpreting() -> bool:
    """Say whether kernels are interpreted on the CPU: Triton decides when it is imported."""
    if os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "yes", "on", "y"):
        return False
    import triton.language as tl

    return type(tl.sigmoid).__name__ == "InterpretedFunction"


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def values(text: GateText, parameters: Mapping[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the parameters that the text names: numbers in its order, tensors by name."""
    return [parameters[n] for n in text.numbers], {n: parameters[n].detach() for n in text.tensors}
