"""The C++ of grouped experts, whole: the activation printed from its formula, between products and loops over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorformer.gates import Gate
from tensorformer.gates.cpp_source import CPP_HELPERS, cpp_body, cpp_lines, cpp_parameter
from tensorformer.gates.expr import Expr
from tensorformer.ops.grouped_experts.activation import Activation
from tensorformer.ops.grouped_experts.native_experts import EXPERTS
from tensorformer.ops.grouped_experts.native_products import PRODUCTS
from tensorformer.ops.grouped_experts.native_task import FIELDS, STACK
from tensorformer.ops.native_numbers import NUMBERS

_TASK = """
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t kChunk = 384;      // rows of an expert at a time: what is between its products stays in the cache
constexpr int64_t kGrain = 1 << 17;  // multiplications that are worth another thread

struct Stack {  // a matrix of each expert
@STACK@
};

struct Task {
@TASK@
};

// The rows sorted by expert: where each expert's begin, which choice each is, and which row each choice.
struct Plan {
  int64_t *starts, *choices, *places;
  explicit Plan(const Task& t)
      : starts(t.plan), choices(starts + t.experts + 1), places(choices + t.tokens * t.top_k) {}
};

// In an order that does not depend on the length of a vector.
template <class A, class B> float dot(int64_t n, const A* a, const B* b) {
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int64_t j = 0; j < 16; ++j) sums[j] += widen(a[i + j]) * widen(b[i + j]);
  float sum = 0.0f;
  for (; i < n; ++i) sum += widen(a[i]) * widen(b[i]);
  for (float s : sums) sum += s;
  return sum;
}
template <class T, class S> void add_scaled(int64_t n, float factor, const T* __restrict from, S* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] += static_cast<S>(factor) * widen(from[i]);
}

}  // namespace
"""

_ACTIVATION = """
namespace {

template <int kStep, class T> void activate(
    int64_t n, const float* p, float share, const T* __restrict g_in, const T* __restrict u_in, T* __restrict to) {
@PARAMETERS@
  for (int64_t i = 0; i < n; ++i) {
@VARIABLES@
@FORWARD@
    narrow(h * share, to[i]);
  }
}

// h, its share, and its share of dh taken back to the projections.
template <int kStep, class T> void activate_back(
    int64_t n, const float* p, float share, const T* __restrict g_in, const T* __restrict u_in,
    const float* __restrict dh_in, float* __restrict h_out, T* __restrict scaled, T* __restrict dg_out,
    T* __restrict du_out) {
@PARAMETERS@
  for (int64_t i = 0; i < n; ++i) {
@VARIABLES@
    const float dh = dh_in[i] * share;
@BACKWARD@
    h_out[i] = h;
    narrow(h * share, scaled[i]);
@GRADIENTS@
  }
}

}  // namespace
"""

_EXPORTS = """
extern "C" int64_t room_@T@(const Task* t) { return room<@T@>(*t); }
extern "C" void forward_@T@(const Task* t) { forward<@T@>(*t); }
extern "C" void backward_@T@(const Task* t) { backward<@T@>(*t); }
"""


def native_source(activation: Activation, parameters: Sequence[str]) -> str:
    """Return a C++17 file that exports ``route``, and ``room_T``, ``forward_T`` and ``backward_T`` for each dtype T.

    Args:
        activation: whose formula it computes; the values of its parameters are arguments, and so is the layout.
        parameters: the names of those in the formula, in the order of the array ``p``.

    Raises:
        GateError: the formula uses a function that has no C++ form.
    """
    values = [f"const float {cpp_parameter(n)} = p[{i}];" for i, n in enumerate(parameters)] or ["(void)p;"]
    inputs = _inputs(activation)
    variables = [f"const float {name} = widen({place}_in[kStep * i]);" for name, place in inputs.items()]
    gradients = [f"narrow(d{name}, d{place}_out[kStep * i]);" for name, place in inputs.items()]
    if len(inputs) == 1:
        values.append("(void)u_in;")
    parts = {
        "@PARAMETERS@": (2, values),
        "@VARIABLES@": (4, variables),
        "@FORWARD@": (4, _forward(activation)),
        "@BACKWARD@": (4, _backward(activation)),
        "@GRADIENTS@": (4, gradients if len(inputs) == 2 else ["(void)du_out;", *gradients]),
        "@STACK@": (2, _members(STACK)),
        "@TASK@": (2, _members(FIELDS)),
    }
    text = _TASK + PRODUCTS + _ACTIVATION + EXPERTS
    for mark, (indent, lines) in parts.items():
        text = text.replace(mark, "\n".join(" " * indent + line for line in lines))
    return CPP_HELPERS + NUMBERS + text + "".join(_EXPORTS.replace("@T@", t) for t in ("float", "bfloat16"))


def _inputs(activation: Activation) -> dict[str, str]:
    """Return the variables of the formula, and the projections that they are."""
    return {"g": "g", "u": "u"} if isinstance(activation.gate, Gate) else {"x": "g"}


def _forward(activation: Activation) -> list[str]:
    gate = activation.gate
    return cpp_body(gate) if isinstance(gate, Gate) else cpp_lines({"h": gate.expr})


def _backward(activation: Activation) -> list[str]:
    gate = activation.gate
    if isinstance(gate, Gate):
        return [*cpp_body(gate, backward=True), "const float h = f_g * f_u;"]
    both: Mapping[str, Expr] = {"h": gate.expr, "d_x": gate.derivative_expr}
    return [*cpp_lines(both), "const float dx = dh * d_x;"]


def _members(fields: Mapping[str, str]) -> list[str]:
    return [f"{kind} {name};" for name, kind in fields.items()]
