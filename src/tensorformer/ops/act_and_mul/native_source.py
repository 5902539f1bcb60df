"""The C++ of a gate: loops over memory of any strides, around the lines printed from its formula."""

from __future__ import annotations

from collections.abc import Sequence

from tensorformer.gates import Gate
from tensorformer.gates.cpp_source import CPP_HELPERS, cpp_body, cpp_parameter
from tensorformer.ops.native_numbers import NUMBERS

# Numbers that lie side by side are computed where they are; a block of others goes through float buffers, so that there
# is one loop of arithmetic for all strides. @…@ is filled in from the formula.
_LOOPS = """
namespace {

constexpr int64_t kBlock = 1024;   // numbers at a time: the buffers stay in the first-level cache
constexpr int64_t kGrain = 16384;  // numbers that are worth another thread

template <class T> struct View {
  T* data;
  int64_t row_step, step;
  T* at(int64_t row, int64_t column) const { return data + row * row_step + column * step; }
};

template <class T> bool dense(View<T> v) { return v.data != nullptr && v.step == 1; }

// Both halves of an interleaved gradient at once.
template <class T> bool interleaved(View<T> a, View<T> b) {
  return a.data != nullptr && b.data == a.data + 1 && a.step == 2 && b.step == 2 && a.row_step == b.row_step;
}
template <class T>
void write_both(T* __restrict to, int64_t n, const float* __restrict first, const float* __restrict second) {
  for (int64_t i = 0; i < n; ++i) {
    narrow(first[i], to[2 * i]);
    narrow(second[i], to[2 * i + 1]);
  }
}

template <class T> __attribute__((noinline)) void forward_block(
    int64_t n, const float* p, const T* __restrict g_in, const T* __restrict u_in, T* __restrict h_out) {
@PARAMETERS@
  for (int64_t i = 0; i < n; ++i) {
    const float g = widen(g_in[i]), u = widen(u_in[i]);
@FORWARD@
    narrow(h, h_out[i]);
  }
}

template <class T> __attribute__((noinline)) void backward_block(
    int64_t n, const float* p, const T* __restrict g_in, const T* __restrict u_in, const T* __restrict dh_in,
    T* __restrict dg_out, T* __restrict du_out) {
@PARAMETERS@
  for (int64_t i = 0; i < n; ++i) {
    const float g = widen(g_in[i]), u = widen(u_in[i]), dh = widen(dh_in[i]);
@BACKWARD@
    narrow(dg, dg_out[i]);
    narrow(du, du_out[i]);
  }
}

template <class F> void each_block(int64_t rows, int64_t columns, int64_t threads, F f) {
  const int64_t pieces = (columns + kBlock - 1) / kBlock, blocks = rows * pieces;
  const auto one = [=](int64_t k) {
    const int64_t column = k % pieces * kBlock;
    f(k / pieces, column, std::min(kBlock, columns - column));
  };
#ifdef _OPENMP
  const int team = static_cast<int>(std::min(std::min(threads, blocks), rows * columns / kGrain));
  if (team > 1) {
#pragma omp parallel for num_threads(team) schedule(static)
    for (int64_t k = 0; k < blocks; ++k) one(k);
    return;
  }
#else
  (void)threads;
#endif
  for (int64_t k = 0; k < blocks; ++k) one(k);
}

template <class T> void forward(
    int64_t rows, int64_t columns, int64_t threads, const float* p, View<const T> g, View<const T> u, View<T> h) {
  const bool all_dense = dense(g) && dense(u) && dense(h);
  each_block(rows, columns, threads, [=](int64_t row, int64_t column, int64_t n) {
    const T *g_at = g.at(row, column), *u_at = u.at(row, column);
    T* h_at = h.at(row, column);
    if (all_dense) return forward_block<T>(n, p, g_at, u_at, h_at);
    alignas(64) float g_in[kBlock], u_in[kBlock], h_out[kBlock];
    read(g_at, g.step, n, g_in);
    read(u_at, u.step, n, u_in);
    forward_block<float>(n, p, g_in, u_in, h_out);
    write(h_at, h.step, n, h_out);
  });
}

template <class T> void backward(
    int64_t rows, int64_t columns, int64_t threads, const float* p, View<const T> g, View<const T> u,
    View<const T> dh, View<T> dg, View<T> du) {
  const bool all_dense = dense(g) && dense(u) && dense(dh) && dense(dg) && dense(du);
  each_block(rows, columns, threads, [=](int64_t row, int64_t column, int64_t n) {
    const T *g_at = g.at(row, column), *u_at = u.at(row, column), *dh_at = dh.at(row, column);
    T *dg_at = dg.at(row, column), *du_at = du.at(row, column);
    if (all_dense) return backward_block<T>(n, p, g_at, u_at, dh_at, dg_at, du_at);
    alignas(64) float g_in[kBlock], u_in[kBlock], dh_in[kBlock], dg_out[kBlock], du_out[kBlock];
    read(g_at, g.step, n, g_in);
    read(u_at, u.step, n, u_in);
    read(dh_at, dh.step, n, dh_in);
    backward_block<float>(n, p, g_in, u_in, dh_in, dg_out, du_out);
    if (interleaved(dg, du)) return write_both(dg_at, n, dg_out, du_out);
    if (dg.data != nullptr) write(dg_at, dg.step, n, dg_out);
    if (du.data != nullptr) write(du_at, du.step, n, du_out);
  });
}

}  // namespace
"""

_EXPORTS = """
extern "C" void forward_@T@(
    int64_t rows, int64_t columns, int64_t threads, const float* p,
    const @T@* g, int64_t g_row, int64_t g_step, const @T@* u, int64_t u_row, int64_t u_step,
    @T@* h, int64_t h_row, int64_t h_step) {
  forward<@T@>(rows, columns, threads, p, {g, g_row, g_step}, {u, u_row, u_step}, {h, h_row, h_step});
}

extern "C" void backward_@T@(
    int64_t rows, int64_t columns, int64_t threads, const float* p,
    const @T@* g, int64_t g_row, int64_t g_step, const @T@* u, int64_t u_row, int64_t u_step,
    const @T@* dh, int64_t dh_row, int64_t dh_step,
    @T@* dg, int64_t dg_row, int64_t dg_step, @T@* du, int64_t du_row, int64_t du_step) {
  backward<@T@>(rows, columns, threads, p, {g, g_row, g_step}, {u, u_row, u_step}, {dh, dh_row, dh_step},
                {dg, dg_row, dg_step}, {du, du_row, du_step});
}
"""


def native_source(gate: Gate, parameters: Sequence[str]) -> str:
    """Return a C++17 file that exports ``forward_T`` and ``backward_T`` for T of ``float`` and ``bfloat16``.

    Args:
        gate: whose formula it computes; the values of its parameters are arguments.
        parameters: the names of those in the formula, in the order of the array ``p``.

    Raises:
        GateError: the formula uses a function that has no C++ form.
    """
    values = [f"const float {cpp_parameter(n)} = p[{i}];" for i, n in enumerate(parameters)] or ["(void)p;"]
    parts = {"@PARAMETERS@": (2, values), "@FORWARD@": (4, cpp_body(gate)), "@BACKWARD@": (4, cpp_body(gate, True))}
    text = _LOOPS
    for mark, (indent, lines) in parts.items():
        text = text.replace(mark, "\n".join(" " * indent + line for line in lines))
    return CPP_HELPERS + NUMBERS + text + "".join(_EXPORTS.replace("@T@", t) for t in ("float", "bfloat16"))
