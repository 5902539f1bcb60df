"""What a call of the C++ is about: one list of fields, for C++ and for Python."""

from __future__ import annotations

import ctypes

#: A matrix of each expert: element (i, j) is ``step·i + j`` numbers on, or if ``across`` ``step·j + i``.
STACK = {"data": "void*", "expert": "int64_t", "step": "int64_t", "across": "int64_t"}

#: Pointers to numbers of the dtype are void; those that are null are absent, or not wanted.
FIELDS = {
    # How many of everything, and where in a row of projections the halves begin, and their step.
    "tokens": "int64_t",
    "top_k": "int64_t",
    "experts": "int64_t",
    "d": "int64_t",
    "d_ff": "int64_t",
    "columns": "int64_t",
    "threads": "int64_t",
    "g_at": "int64_t",
    "u_at": "int64_t",
    "apart": "int64_t",
    # Of torch's BLAS: the product of floats, and the limit on the threads that it may take.
    "sgemm": "void*",
    "limit": "void*",
    # The routing, the numbers in the formula, the weight of every choice, and memory of the threads.
    "plan": "int64_t*",
    "parameters": "float*",
    "shares": "float*",
    "room": "void*",
    # Operands.
    "x": "void*",
    "x_step": "int64_t",
    "dy": "void*",
    "dy_step": "int64_t",
    "first": "Stack",
    "second": "Stack",
    "first_bias": "void*",
    "second_bias": "void*",
    # Results; in `outs` what each row adds to y or to dx.
    "kept": "void*",
    "outs": "void*",
    "y": "void*",
    "dx": "void*",
    "d_first": "Stack",
    "d_second": "Stack",
    "d_first_bias": "void*",
    "d_second_bias": "void*",
    "d_shares": "float*",
}


class Stack(ctypes.Structure):
    """A matrix of each expert."""

    _fields_ = [(n, ctypes.c_int64 if kind == "int64_t" else ctypes.c_void_p) for n, kind in STACK.items()]


def _type(kind: str) -> type:
    return Stack if kind == "Stack" else ctypes.c_int64 if kind == "int64_t" else ctypes.c_void_p


class Task(ctypes.Structure):
    """One call."""

    _fields_ = [(n, _type(kind)) for n, kind in FIELDS.items()]
