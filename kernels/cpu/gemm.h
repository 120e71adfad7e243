// GEMM c (+)= a b^T in fp32 for matrices of any size and memory layout, with blocks packed for the caches (Goto and van
// de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"). bf16 operands are converted to fp32 while
// packing.
#pragma once

#include "gemm_transpose.h"

namespace megads {

// Inner elements per pass over c. Rounding errors grow with the length of a sum, so this block size also sets accuracy.
constexpr int64_t kInnerBlock = 256;
constexpr int64_t kRowBlock = 192;      // of a: 192 KiB with kInnerBlock, which stay in the L2 cache
constexpr int64_t kColumnBlock = 8192;  // of b: 8 MiB

#if defined(__AVX512F__)
constexpr int kPanelRows = 6, kPanelVectors = 4;  // the register tile of c takes 24 of 32 registers
#elif defined(__aarch64__)
constexpr int kPanelRows = 4, kPanelVectors = 4;  // 16 of 32; with 24 GCC 12 spills, as it loads all rows of a at once
#else
constexpr int kPanelRows = 6, kPanelVectors = 2;  // 12 of 16
#endif
constexpr int kPanelColumns = kPanelVectors * kLanes;
constexpr int64_t kSlack = 8;  // floats that pack_rows may write past its last panel

// Packs rows first..last-1 and inner elements begin..end-1 into panels of kPanelRows rows, each laid out
// [inner, kPanelRows]. The last panel is padded with zero rows. T is float or BFloat16.
template <typename T>
void pack_rows(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to);

// The same in panels of kPanelColumns; writes nothing past the last panel.
template <typename T>
void pack_columns(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to);

// c [rows, columns] = start + a b^T for packed blocks of `inner` elements. Row r of `start` is at
// start + r * start_row: c itself, or a bias with start_row 0; null: zero.
void block_product(int64_t rows, int64_t columns, int64_t inner, const float* packed_a, const float* packed_b,
                   const float* start, int64_t start_row, float* c, int64_t c_row);

}  // namespace megads
