"""The C++ of reading and writing numbers: whatever the dtype, arithmetic is on floats."""

from __future__ import annotations

#: After the helpers of ``gates.cpp_source``, of which it uses the bits of a float.
NUMBERS = """
#include <algorithm>

namespace {

struct bfloat16 { uint16_t bits; };

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return gate::from_bits(static_cast<uint32_t>(x.bits) << 16); }

inline void narrow(float x, float& to) { to = x; }
// To nearest, ties to even; a NaN stays one whatever its bits.
inline void narrow(float x, bfloat16& to) {
  const uint32_t bits = gate::to_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(x == x ? rounded : 0x7FC0u);
}

// Steps of one and two are written out, for the compiler to make vectors of.
template <class T> void read(const T* __restrict from, int64_t step, int64_t n, float* __restrict to) {
  if (step == 1) { for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]); }
  else if (step == 2) { for (int64_t i = 0; i < n; ++i) to[i] = widen(from[2 * i]); }
  else { for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i * step]); }
}
template <class T> void write(T* __restrict to, int64_t step, int64_t n, const float* __restrict from) {
  if (step == 1) { for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]); }
  else { for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i * step]); }
}

}  // namespace
"""
