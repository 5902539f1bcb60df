"""From expressions to lines of C++, in float32, and the functions that such lines call.

Nothing here branches, so that a compiler turns a loop over the lines into vector instructions; and nothing asks for
fast-math, so that infinities and NaN stay what they are. Largest error over the normal numbers, in units of the last
place: exp 1.1, log 1.0, tanh 1.5, σ 2.2, expm1 3.0, softplus 3.5, Φ 6.0 (in its tail as well); subnormal results are
rounded, not flushed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from tensorformer.gates import expr as ex
from tensorformer.gates.by_exp import by_exp
from tensorformer.gates.expr import Expr
from tensorformer.gates.gate import Gate
from tensorformer.gates.printing import Marker, Printer, guarded, numeric, shared

_VARIABLES = (ex.x, ex.g, ex.u)


class reciprocal(Marker):
    """1/z of a parameter: the compiler takes it out of the loop, where it would leave a division in."""


class tail(Marker):
    """Φ, kept from ``by_exp``: with e^(−z²/2) apart it has all its digits, and shares that with its own derivative."""


@final
class _Cpp(Printer):
    """Numbers are floats: a bare decimal would pull the whole expression into double."""

    def __call__(self, expr: Expr) -> str:
        return f"{float(expr)!r}f" if expr.is_number else super().__call__(expr)


# Every argument is a value, so that both sides of a choice are there before it is made.
# fmt: off
_CPP = _Cpp({
    "square": "gate::square({0})", "sigmoid": "gate::sigmoid({0})", "exp": "gate::exp({0})", "log": "gate::log({0})",
    "sqrt": "__builtin_sqrtf({0})", "Abs": "__builtin_fabsf({0})",
    "hump": "gate::hump({0})", "dome": "gate::dome({0})", "gauss": "(0.3989422804014327f*gate::decay({0}))",
    "tail": "gate::Phi({0})",
    "relu": "gate::at_least({0}, 0.0f)", "cap": "gate::at_most({0}, {1})", "clip": "gate::clip({0}, {1}, {2})",
    "above": "gate::above({0}, {1})", "within": "gate::within({0}, {1}, {2})",
    "reciprocal": "(1.0f/{0})", "select": "gate::select({0} < {1}, {2}, {3})",
    "positive": "gate::clip({0}, 16.0f*__FLT_MIN__, __FLT_MAX__)",
    "finite": "gate::clip({0}, -__FLT_MAX__, __FLT_MAX__)", "floored": "gate::at_least({0}, -__FLT_MAX__)",
}, "C++", "cpp_source")
# fmt: on

# exp: x = k·ln 2 + r, with ln 2 in two parts of which the first, times any such k, is exact; then (e^r − 1 − r)/r² in
# r, |r| < ln 2 / 2, by Chebyshev interpolation of the 40-digit function, error of e^r 8e-9. 2^k is made of two powers,
# so that results too small to be normal come out rounded, not as zero.
# log: x = 2^k·(1 + f), f from √½ − 1 to √2 − 1; then (log(1 + f) − f + f²/2)/f³ in f, the same way, error 4e-9.
# Phi: Φ(−a)·e^(a²/2)/t in t − ½, t = 1/(1 + 0.3a), a < 15, the same way, error 4e-9.
CPP_HELPERS = """\
#include <cstdint>
#include <cstring>

namespace gate {

inline float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// Written so that a NaN in z comes out again.
inline float select(bool first, float p, float q) { return first ? p : q; }
inline float at_least(float z, float low) { return z < low ? low : z; }
inline float at_most(float z, float high) { return z > high ? high : z; }
inline float clip(float z, float low, float high) { return at_most(at_least(z, low), high); }
inline float above(float a, float b) { return a > b ? 1.0f : (a <= b ? 0.0f : a + b); }
inline float within(float z, float low, float high) {
  const float inside = (z >= low) & (z <= high) ? 1.0f : 0.0f;
  return z == z ? inside : z;
}

inline float square(float z) { return z * z; }
inline float hump(float s) { return s * (1.0f - s); }
inline float dome(float t) { return 1.0f - t * t; }

// e^(x + rest), where |rest| is small and x + rest would lose it.
inline float exp_of_two(float x, float rest) {
  // Adding 1.5·2²³ rounds to an integer, which is then in the low bits.
  const float shifted = (x + rest) * 1.44269504f + 12582912.0f;
  const float k = shifted - 12582912.0f;
  const float r = (x - k * 0.693359375f) + (rest + k * 2.12194440e-4f);
  float q = 1.392625083e-3f;
  q = q * r + 8.363232884e-3f;
  q = q * r + 4.166655421e-2f;
  q = q * r + 1.666657667e-1f;
  q = q * r + 0.5f;
  const float y = (q * r * r + r) + 1.0f;
  const int32_t power = static_cast<int32_t>(to_bits(shifted) - 0x4B400000u);
  const int32_t half = power >> 1;
  return y * from_bits(static_cast<uint32_t>(half + 127) << 23)
           * from_bits(static_cast<uint32_t>(power - half + 127) << 23);
}

inline float exp(float x) { return exp_of_two(clip(x, -104.0f, 89.0f), 0.0f); }

// e^(-z²/2). Rounding z² would cost z²/2 units of the last place; the upper half of z's digits has an exact square.
// Past 15 the result is 0 anyway, and ∞ - ∞ is not met.
inline float decay(float z) {
  z = clip(z, -15.0f, 15.0f);
  const float top = from_bits(to_bits(z) & 0xFFFFF000u);
  return exp_of_two(-0.5f * (top * top), -0.5f * ((z - top) * (z + top)));
}

inline float Phi(float z) {
  const float t = 1.0f / (0.3f * __builtin_fabsf(z) + 1.0f);
  const float s = t - 0.5f;
  float q = -2.098466922e-2f;
  q = q * s + 1.997108715e-2f;
  q = q * s + 3.591095080e-2f;
  q = q * s - 3.652677141e-2f;
  q = q * s - 7.754213386e-2f;
  q = q * s + 2.906062712e-2f;
  q = q * s + 2.220820195e-1f;
  q = q * s + 3.461987400e-1f;
  q = q * s + 3.291589844e-1f;
  q = q * s + 2.219706211e-1f;
  const float tail = decay(z) * (q * t);
  return z < 0.0f ? tail : 1.0f - tail;
}

// e^-|z| never overflows, and keeps the left tail.
inline float sigmoid(float z) {
  const float e = exp(-__builtin_fabsf(z));
  return (z < 0.0f ? e : 1.0f) / (1.0f + e);
}

// For positive normal numbers: `positive` comes before it.
inline float log(float x) {
  const int32_t power = static_cast<int32_t>(to_bits(x) - 0x3F3504F3u) >> 23;
  const float f = from_bits(to_bits(x) - (static_cast<uint32_t>(power) << 23)) - 1.0f;
  const float k = static_cast<float>(power);
  float q = 6.971611471e-2f;
  q = q * f - 1.147973385e-1f;
  q = q * f + 1.168541992e-1f;
  q = q * f - 1.242568733e-1f;
  q = q * f + 1.424905765e-1f;
  q = q * f - 1.666780232e-1f;
  q = q * f + 2.000071575e-1f;
  q = q * f - 2.499999696e-1f;
  q = q * f + 3.333333118e-1f;
  const float y = (q * f - 0.5f) * f * f;
  const float found = (f + (y - k * 2.12194440e-4f)) + k * 0.693359375f;
  return x == x ? found : x;
}

}  // namespace gate
"""


def cpp_parameter(name: str) -> str:
    """Return the C++ variable of a gate's parameter, which is no keyword and no other variable."""
    return f"p_{name}"


def cpp_lines(outputs: Mapping[str, Expr], temporary: str = "t") -> list[str]:
    """Return the statements that define each output as a ``const float``, common parts computed once.

    Args:
        outputs: the name of a variable to each expression. ``g``, ``u`` and ``x`` are variables of their own names,
            parameters are called as by ``cpp_parameter``.
        temporary: the prefix of the names of intermediate values.

    Returns:
        Lines that are good in the scope of ``CPP_HELPERS``.

    Raises:
        GateError: an expression uses a function that has no C++ form.
    """
    ready = [_marked(e) for e in outputs.values()]
    parameters = {s for e in ready for s in e.free_symbols if s not in _VARIABLES}
    names = {s: ex.symbol(cpp_parameter(s.name)) for s in parameters}
    temporaries, results = shared([e.xreplace(names) for e in ready], temporary)
    assigned = [*temporaries, *zip(outputs, results, strict=True)]
    return [f"const float {name} = {_CPP(e)};" for name, e in assigned]


def _marked(expr: Expr) -> Expr:
    expr = numeric(by_exp(guarded(expr).replace(ex.Phi, tail)))
    return expr.replace(lambda e: e.is_Pow and e.exp == -1 and _is_parameter(e.base), lambda e: reciprocal(e.base))


def _is_parameter(expr: Expr) -> bool:
    return bool(expr.is_Symbol and expr not in _VARIABLES)


def cpp_body(gate: Gate, backward: bool = False) -> list[str]:
    """Return the statements that compute ``h`` from ``g`` and ``u``; or, backward, ``dg`` and ``du`` from ``dh`` too.

    dg = dh·ψ(u)·φ'(g) and du = dh·φ(g)·ψ'(u), in float32.

    Raises:
        GateError: the gate's formula uses a function that has no C++ form.
    """
    sides = [(ex.g, gate.gate), (ex.u, gate.value)]
    values = {f"f_{v}": s.expr.xreplace({ex.x: v}) for v, s in sides}
    if not backward:
        return [*cpp_lines(values), "const float h = f_g * f_u;"]
    slopes = {f"d_{v}": s.derivative_expr.xreplace({ex.x: v}) for v, s in sides}
    lines = cpp_lines(values | slopes)
    return [*lines, "const float dg = dh * f_u * d_g;", "const float du = dh * f_g * d_u;"]
