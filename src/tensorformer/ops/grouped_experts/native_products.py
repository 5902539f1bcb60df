"""The C++ of products of matrices, on one thread: of floats by torch's BLAS, of bfloat16 by the processor's own dots.

Where the processor has no dot of bfloat16 pairs (AVX512-BF16), they are widened, and multiplied as floats.
"""

from __future__ import annotations

# A matrix has numbers side by side in one direction: element (i, j) is data[i * step + j], or `across` data[j * step +
# i]. Sums are float. `Room` hands out the memory of one thread; one that begins at 0 tells how much that is.
PRODUCTS = """
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kFew = 3;  // rows that are multiplied as they lie

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);

template <class T> struct Matrix {
  T* data;
  int64_t step;
  bool across;
  operator Matrix<const T>() const { return {data, step, across}; }
};
template <class T> Matrix<T> flipped(Matrix<T> m) { return {m.data, m.step, !m.across}; }

struct Room {
  uintptr_t at;
  template <class T> T* take(int64_t count) {
    T* found = reinterpret_cast<T*>(at);
    at += (static_cast<uintptr_t>(count) * sizeof(T) + 63) & ~uintptr_t(63);
    return found;
  }
};

void zero(int64_t n, float* __restrict to) { for (int64_t i = 0; i < n; ++i) to[i] = 0.0f; }

void floats_product(Sgemm sgemm, int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b,
                    bool add, Matrix<float> c) {
  if (m == 0 || n == 0 || (k == 0 && add)) return;
  if (k == 0) {
    for (int64_t i = 0; i < m; ++i) zero(n, c.data + i * c.step);
    return;
  }
  // BLAS has columns where these are rows: it is given c' = b' a'.
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), depth = static_cast<int>(k);
  const int a_step = static_cast<int>(a.step), b_step = static_cast<int>(b.step), c_step = static_cast<int>(c.step);
  const float one = 1.0f, before = add ? 1.0f : 0.0f;
  sgemm(b.across ? "T" : "N", a.across ? "T" : "N", &columns, &rows, &depth, &one, b.data, &b_step, a.data, &a_step,
        &before, c.data, &c_step);
}

#ifdef __AVX512BF16__
constexpr int kLanes = 16;              // dots of pairs in a vector
constexpr int kRows = 12;               // rows of c at a time, and columns: all sums stay in registers
constexpr int kColumns = 2 * kLanes;
constexpr int64_t kDepth = 256;         // of a panel of each: both stay in the first-level cache
constexpr int64_t kHeight = 64 * kRows; // rows whose panels stay in the second-level cache

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
uint32_t pair(bfloat16 first, bfloat16 second) {
  return static_cast<uint32_t>(first.bits) | static_cast<uint32_t>(second.bits) << 16;
}

// Pairs along the depth, `Width` lanes side by side; zeros where there are no more.
template <int Width>
void pack_lanes(const bfloat16* from, int64_t step, int64_t lanes, int64_t depth, uint32_t* __restrict to) {
  for (int64_t p = 0; p < depth; p += 2, to += Width) {
    const bfloat16 *first = from + p * step, *second = first + step;
    const bool alone = p + 1 == depth;
    if (lanes >= Width && !alone) {
      for (int i = 0; i < Width; ++i) to[i] = pair(first[i], second[i]);
    } else {
      for (int i = 0; i < Width; ++i)
        to[i] = i < lanes ? pair(first[i], alone ? bfloat16{0} : second[i]) : 0u;
    }
  }
}
template <int Width>
void pack_depth(const bfloat16* from, int64_t step, int64_t lanes, int64_t depth, uint32_t* __restrict to) {
  const int64_t pairs = depth / 2;
  for (int64_t i = 0; i < Width; ++i) {
    const bfloat16* row = from + i * step;
    if (i >= lanes) {
      for (int64_t p = 0; p < (depth + 1) / 2; ++p) to[p * Width + i] = 0u;
      continue;
    }
    for (int64_t p = 0; p < pairs; ++p) std::memcpy(to + p * Width + i, row + 2 * p, 4);
    if (depth % 2) to[pairs * Width + i] = pair(row[depth - 1], bfloat16{0});
  }
}
// Rows first to last - 1 of m (lanes), columns k0 to k0 + depth - 1.
template <int Width>
void pack(Matrix<const bfloat16> m, int64_t first, int64_t last, int64_t k0, int64_t depth, uint32_t* to) {
  for (int64_t i = first; i < last; i += Width, to += (depth + 1) / 2 * Width) {
    if (m.across) pack_lanes<Width>(m.data + k0 * m.step + i, m.step, last - i, depth, to);
    else pack_depth<Width>(m.data + i * m.step + k0, m.step, last - i, depth, to);
  }
}

__attribute__((noinline)) void panel(
    int64_t pairs, const uint32_t* a, const uint32_t* b, int64_t rows, int64_t columns, bool add, float* c,
    int64_t step) {
  __m512 sums[kRows][2];
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p, a += kRows, b += kColumns) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(b), second = (__m512bh)_mm512_loadu_si512(b + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r]));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, first);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, second);
    }
  }
  const auto there = [](int64_t n) {
    return static_cast<__mmask16>(n >= kLanes ? 0xFFFFu : n > 0 ? (1u << n) - 1u : 0u);
  };
  const __mmask16 masks[2] = {there(columns), there(columns - kLanes)};
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    for (int half = 0; half < 2; ++half) {
      float* at = c + r * step + half * kLanes;
      const __m512 found = add ? _mm512_add_ps(sums[r][half], _mm512_maskz_loadu_ps(masks[half], at)) : sums[r][half];
      _mm512_mask_storeu_ps(at, masks[half], found);
    }
  }
}

// Of products no side of which is larger.
int64_t spare_for(int64_t, int64_t n) { return kDepth / 2 * (kHeight + up(n, kColumns)); }

void pairs_product(int64_t m, int64_t n, int64_t k, Matrix<const bfloat16> a, Matrix<const bfloat16> b, bool add,
                   float* c, int64_t step, uint32_t* spare) {
  uint32_t *of_a = spare, *of_b = spare + kDepth / 2 * kHeight;
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const int64_t depth = std::min(kDepth, k - k0), pairs = (depth + 1) / 2;
    pack<kColumns>(flipped(b), 0, n, k0, depth, of_b);
    for (int64_t top = 0; top < m; top += kHeight) {
      const int64_t end = std::min(m, top + kHeight);
      pack<kRows>(a, top, end, k0, depth, of_a);
      for (int64_t j = 0; j < n; j += kColumns)
        for (int64_t i = top; i < end; i += kRows)
          panel(pairs, of_a + (i - top) * pairs, of_b + j * pairs, std::min<int64_t>(kRows, end - i),
                std::min<int64_t>(kColumns, n - j), add || k0, c + i * step + j, step);
    }
  }
}
#else
int64_t spare_for(int64_t deepest, int64_t widest) { return 2 * deepest * widest + 16; }

// Row by row as it lies.
Matrix<const float> widened(int64_t rows, int64_t columns, Matrix<const bfloat16> m, float* to) {
  const int64_t outer = m.across ? columns : rows, inner = m.across ? rows : columns;
  for (int64_t i = 0; i < outer; ++i) read(m.data + i * m.step, 1, inner, to + i * inner);
  return {to, std::max<int64_t>(1, inner), m.across};
}
#endif

// A row times a matrix, as both lie: nothing is worth packing.
template <class T> void row_product(int64_t n, int64_t k, const T* a, Matrix<const T> b, float* __restrict c) {
  if (b.across) {
    for (int64_t j = 0; j < n; ++j) c[j] = dot(k, a, b.data + j * b.step);
    return;
  }
  zero(n, c);
  int64_t i = 0;
  for (; i + 4 <= k; i += 4) {
    const T *b0 = b.data + i * b.step, *b1 = b0 + b.step, *b2 = b1 + b.step, *b3 = b2 + b.step;
    const float a0 = widen(a[i]), a1 = widen(a[i + 1]), a2 = widen(a[i + 2]), a3 = widen(a[i + 3]);
    for (int64_t j = 0; j < n; ++j)
      c[j] += (a0 * widen(b0[j]) + a1 * widen(b1[j])) + (a2 * widen(b2[j]) + a3 * widen(b3[j]));
  }
  for (; i < k; ++i) add_scaled(n, widen(a[i]), b.data + i * b.step, c);
}

void many_product(Sgemm sgemm, int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b, bool add,
                  Matrix<float> c, uint32_t*) {
  floats_product(sgemm, m, n, k, a, b, add, c);
}
void many_product(Sgemm sgemm, int64_t m, int64_t n, int64_t k, Matrix<const bfloat16> a, Matrix<const bfloat16> b,
                  bool add, Matrix<float> c, uint32_t* spare) {
#ifdef __AVX512BF16__
  (void)sgemm;
  if (k > 0) return pairs_product(m, n, k, a, b, add, c.data, c.step, spare);
  for (int64_t i = 0; i < m && !add; ++i) zero(n, c.data + i * c.step);
#else
  float *of_a = reinterpret_cast<float*>(spare), *of_b = of_a + ((m * k + 15) & ~int64_t(15));
  floats_product(sgemm, m, n, k, widened(m, k, a, of_a), widened(k, n, b, of_b), add, c);
#endif
}

// c = a b (+ c), of m by k and k by n.
template <class T> void product(Sgemm sgemm, int64_t m, int64_t n, int64_t k, Matrix<const T> a, Matrix<const T> b,
                                bool add, Matrix<float> c, uint32_t* spare) {
  if (c.across) return product(sgemm, n, m, k, flipped(b), flipped(a), add, flipped(c), spare);
  if (m > kFew || a.across || add) return many_product(sgemm, m, n, k, a, b, add, c, spare);
  for (int64_t i = 0; i < m; ++i) row_product(n, k, a.data + i * a.step, b, c.data + i * c.step);
}

}  // namespace
"""
