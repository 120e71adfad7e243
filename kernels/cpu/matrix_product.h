// GEMM c (+)= a b with fp32 accumulators, for blocks that fit the cache.
#pragma once

#include "vector.h"

namespace megads {

// GEMM operand unit: an fp32 element or, if the processor multiplies bf16, a pair of consecutive bf16 elements along
// the inner dimension. Otherwise bf16 is converted to fp32 first.
template <typename T>
struct Operand {
  using Unit = float;
  static constexpr int kValues = 1;
};

inline Floats multiply_add(Floats sum, float a, Floats b) { return sum + a * b; }

inline void store_beside(float* to, Floats x) { store(to, x); }

inline void store_interleaved(float* to, const Floats* rows) { store(to, rows[0]); }

#if defined(__AVX512BF16__)

struct Pair {
  uint32_t bits;
};

template <>
struct Operand<BFloat16> {
  using Unit = Pair;
  static constexpr int kValues = 2;
};

inline Words load(const Pair* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(Pair* to, Words x) { std::memcpy(to, &x, sizeof x); }

// Treats denormals as zero.
inline Floats multiply_add(Floats sum, Pair a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a.bits)), (__m512bh)b);
}

// Consecutive elements of x form a pair.
inline void store_beside(Pair* to, Floats x) { store(reinterpret_cast<BFloat16*>(to), x); }

// An element of the first row and the one below it form a pair.
inline void store_interleaved(Pair* to, const Floats* rows) {
  const auto even = (__m256i)_mm512_cvtneps_pbh((__m512)rows[0]), odd = (__m256i)_mm512_cvtneps_pbh((__m512)rows[1]);
  store(to, (Words)_mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
}

#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;  // six rows take 24 of 32 registers
#else
constexpr int kTileVectors = 2;  // 12 of 16
#endif

template <int kRows, int kVectors, typename Unit>
inline __attribute__((always_inline)) void tile_product(int64_t inner, const Unit* a, int64_t a_row, int64_t a_inner,
                                                        const Unit* b, int64_t b_row, float* c, int64_t c_row,
                                                        bool add) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[r][j] = add ? load(c + r * c_row + j * kLanes) : Floats{};
  for (int64_t i = 0; i < inner; ++i) {
    decltype(load(b)) of_b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) of_b[j] = load(b + i * b_row + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Unit of_a = a[r * a_row + i * a_inner];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[r][j] = multiply_add(sums[r][j], of_a, of_b[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(c + r * c_row + j * kLanes, sums[r][j]);
}

// c [kRows, columns] = a [kRows, inner] b [inner, columns], plus c if `add`. columns is a multiple of kLanes; rows of b
// and c are contiguous; element (r, i) of a is at a[r * a_row + i * a_inner]. inner counts units.
template <int kRows, typename Unit>
inline void rows_product(int64_t columns, int64_t inner, const Unit* a, int64_t a_row, int64_t a_inner, const Unit* b,
                         int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= columns; column += kTileVectors * kLanes)
    tile_product<kRows, kTileVectors>(inner, a, a_row, a_inner, b + column, b_row, c + column, c_row, add);
  const int64_t rest = (columns - column) / kLanes;
  b += column;
  c += column;
  if (rest == 3) tile_product<kRows, 3>(inner, a, a_row, a_inner, b, b_row, c, c_row, add);
  if (rest == 2) tile_product<kRows, 2>(inner, a, a_row, a_inner, b, b_row, c, c_row, add);
  if (rest == 1) tile_product<kRows, 1>(inner, a, a_row, a_inner, b, b_row, c, c_row, add);
}

}  // namespace megads
