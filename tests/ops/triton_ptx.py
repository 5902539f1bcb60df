"""Compile a Triton kernel for an H100 without having one, and read what it became."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tensorformer.ops.triton_kernel import OPTIONS

# Floating-point instructions that are an exponential or a logarithm, and that divide.
_EXPONENTIAL = re.compile(r"\b(?:ex2|lg2|tanh)\.[\w.]*f(?:16|32|64)")
_DIVISION = re.compile(r"\b(?:div|rcp|rsqrt)\.[\w.]*f(?:16|32|64)")


def ptx(
    kernel: Any, numbers: tuple[str, ...], constants: dict[str, Any], *, dtype: str = "bf16", **options: Any
) -> str:
    """Return the PTX of ``kernel`` for sm_90.

    Args:
        kernel: a ``triton.jit`` function whose pointers are called ``…_pointer``, and strides along the last axis
            ``…_column``: those are 1 unless ``constants`` has them.
        numbers: the arguments that are float32 numbers; what is left are 32-bit sizes and strides, multiples of 16.
        constants: values of the ``tl.constexpr`` arguments, and of any other.
        dtype: of what all pointers point to, as Triton spells it.
        options: how to compile, such as ``num_warps``.
    """
    signature, aligned = {}, {}
    fixed = {n: 1 for n in kernel.arg_names if n.endswith("_column")} | constants
    for i, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name in numbers:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{dtype}" if name.endswith("_pointer") else "i32"
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**OPTIONS, **options}).asm["ptx"]


def exponentials(text: str) -> list[str]:
    """Return the exponentials and logarithms in ``text``."""
    return _EXPONENTIAL.findall(text)


def divisions(text: str) -> list[str]:
    """Return the floating-point divisions and reciprocals in ``text``."""
    return _DIVISION.findall(text)
