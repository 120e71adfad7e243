// c (+)= a b in fp32 for blocks that lie in the cache.
#pragma once

#include "vector.h"

namespace megads {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers hold the tile
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif

template <int kRows, int kVectors>
inline __attribute__((always_inline)) void tile_product(int64_t inner, const float* a, int64_t a_row, int64_t a_inner,
                                                        const float* b, int64_t b_row, float* c, int64_t c_row,
                                                        bool add) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[r][j] = add ? load(c + r * c_row + j * kLanes) : Floats{};
  for (int64_t i = 0; i < inner; ++i) {
    Floats of_b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) of_b[j] = load(b + i * b_row + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float of_a = a[r * a_row + i * a_inner];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[r][j] += of_a * of_b[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(c + r * c_row + j * kLanes, sums[r][j]);
}

template <int kVectors>
inline void strip_product(int64_t rows, int64_t inner, const float* a, int64_t a_row, int64_t a_inner, const float* b,
                          int64_t b_row, float* c, int64_t c_row, bool add) {
  for (; rows >= kTileRows; rows -= kTileRows, a += kTileRows * a_row, c += kTileRows * c_row)
    tile_product<kTileRows, kVectors>(inner, a, a_row, a_inner, b, b_row, c, c_row, add);
  for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * c_row)
    tile_product<2, kVectors>(inner, a, a_row, a_inner, b, b_row, c, c_row, add);
  if (rows) tile_product<1, kVectors>(inner, a, a_row, a_inner, b, b_row, c, c_row, add);
}

// c [rows, columns] = a [rows, inner] b [inner, columns], plus c itself where `add`. columns is a multiple of kLanes;
// rows of b and c are contiguous; element (r, i) of a is at a[r * a_row + i * a_inner].
inline void matrix_product(int64_t rows, int64_t columns, int64_t inner, const float* a, int64_t a_row,
                           int64_t a_inner, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= columns; column += kTileVectors * kLanes)
    strip_product<kTileVectors>(rows, inner, a, a_row, a_inner, b + column, b_row, c + column, c_row, add);
  for (; column < columns; column += kLanes)
    strip_product<1>(rows, inner, a, a_row, a_inner, b + column, b_row, c + column, c_row, add);
}

}  // namespace megads
