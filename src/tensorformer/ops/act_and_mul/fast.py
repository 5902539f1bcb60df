"""In torch's own operations, tile by tile: what is between them stays in the cache, and h and dx are written once.

A torch operation on a tensor larger than the cache runs at the speed of memory, and what it returns, past 32 MiB, is
mapped anew and faulted in page by page at every call. One tile's temporaries are neither.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tensorformer.gates import Gate
from tensorformer.ops.act_and_mul.program import is_exact, program
from tensorformer.ops.operands import tensor_parameters

TILE = 1 << 17  # elements; a fifth of a millisecond of work, and half a megabyte a temporary


def forward(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    """Return φ(g)·ψ(u) in a new contiguous tensor; bfloat16 and float16 in float32, rounded once.

    Args:
        gate: bound; a parameter that is a tensor broadcasts to g.
        g, u: one shape, floating dtype and device, any strides.
    """
    h = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    _run(gate, ("h",), (g, u), (h,))
    return h


def backward(gate: Gate, g: Tensor, u: Tensor, dh: Tensor, dg: Tensor | None, du: Tensor | None) -> None:
    """Write dh·∂h/∂g into ``dg`` and dh·∂h/∂u into ``du``, where they are wanted.

    Args:
        gate: as in ``forward``.
        g, u, dh: one shape, dtype and device, any strides.
        dg, du: the same shape and dtype, any strides that do not overlap; not memory of the operands.
    """
    outputs = {"dg": dg, "du": du}
    wanted = tuple(n for n, x in outputs.items() if x is not None)
    if wanted:
        _run(gate, wanted, (g, u, dh), tuple(x for x in outputs.values() if x is not None))


def _run(gate: Gate, wanted: tuple[str, ...], operands: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    g, count = operands[0], len(operands)
    direct = g.dtype in (torch.float32, torch.float64) or is_exact(gate)
    dtype = g.dtype if direct else torch.float32
    steps = program(gate, dtype, wanted)
    filled = count + len(outputs)
    shape, scratch = None, []
    whole = (*operands, *outputs, *parameters(gate, dtype, g.dim()))
    # One operation has nothing to keep in the cache.
    for tile in tiles(size(g) if steps.scratch or len(outputs) > 1 else max(1, g.numel()), whole):
        if tile[0].shape != shape:
            shape = tile[0].shape
            number = steps.scratch + (0 if direct else filled)
            scratch = [torch.empty(shape, dtype=dtype, device=g.device) for _ in range(number)]
        if direct:
            steps.run(*tile[:filled], *scratch, *tile[filled:])
            continue
        for wide, narrow in zip(scratch, tile[:count], strict=False):
            wide.copy_(narrow)
        steps.run(*scratch, *tile[filled:])
        for narrow, wide in zip(tile[count:filled], scratch[count:], strict=False):
            narrow.copy_(wide)


def tiles(limit: int, tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of the first one's shape, alike, into views of at most ``limit`` elements; an axis of one stays."""
    first = tensors[0]
    if first.numel() <= limit:
        yield tensors
        return
    length = first.shape[0]
    row = first.numel() // length
    if row <= limit:
        step = limit // row
        pieces = -(-length // step)
        yield from zip(*(t.split(step) if len(t) == length else (t,) * pieces for t in tensors), strict=True)
        return
    for rows in zip(*(t.unbind() if len(t) == length else (t[0],) * length for t in tensors), strict=True):
        yield from tiles(limit, rows)


def size(x: Tensor) -> int:
    """Return how many elements of ``x`` make a tile: on an accelerator all of them."""
    return TILE * torch.get_num_threads() if x.device.type == "cpu" else max(1, x.numel())


def parameters(gate: Gate, dtype: torch.dtype, axes: int) -> list[Tensor]:
    """Return the parameters that are tensors, with as many axes as the operands."""
    found = tensor_parameters(gate).values()
    return [v.to(dtype).reshape((1,) * (axes - v.dim()) + v.shape) for v in found]
