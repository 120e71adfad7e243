// c (+)= a b^T in fp32 for matrices of any size and order in memory, by blocks that are packed for the caches (Goto and
// van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"). Operands in bf16 are widened as they are packed.
#pragma once

#include "gemm_transpose.h"

namespace megads {

// Inner elements of one pass over c. Rounding errors grow with the length of a sum, so this is also what makes it exact.
constexpr int64_t kInnerBlock = 256;
constexpr int64_t kRowBlock = 192;      // of a: 192 KiB with kInnerBlock, which stay in the second cache
constexpr int64_t kColumnBlock = 8192;  // of b: 8 MiB

#if defined(__AVX512F__)
constexpr int kPanelRows = 6, kPanelVectors = 4;  // 24 of 32 registers hold a tile of c
#else
constexpr int kPanelRows = 6, kPanelVectors = 2;  // 12 of 16
#endif
constexpr int kPanelColumns = kPanelVectors * kLanes;
constexpr int64_t kSlack = 8;  // floats that pack_rows may write behind its last panel

// Packs rows first..last-1 and inner elements begin..end-1: panels of kPanelRows rows, in each of them the rows of one
// inner element after those of the other. Rows that the last panel lacks are zero. T is float or BFloat16.
template <typename T>
void pack_rows(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to);

// The same in panels of kPanelColumns; writes nothing behind them.
template <typename T>
void pack_columns(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to);

// c [rows, columns] = start + a b^T of packed blocks of `inner` elements. Row r of `start` is at start + r * start_row:
// c itself, or with start_row 0 a bias; null is zero.
void block_product(int64_t rows, int64_t columns, int64_t inner, const float* packed_a, const float* packed_b,
                   const float* start, int64_t start_row, float* c, int64_t c_row);

}  // namespace megads
