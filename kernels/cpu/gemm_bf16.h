// GEMM c (+)= a b^T of bf16 matrices with fp32 accumulators, by the pairwise dot-product instruction (AVX-512 BF16). A
// column panel of b stays in the L2 cache for all rows of a, and a tile's accumulators stay in registers over the whole
// inner dimension: nothing but c is written. Denormals are treated as zero.
#pragma once

#include "gemm_transpose.h"

#if defined(__AVX512BF16__)

#include <algorithm>

namespace megads::bf16 {

constexpr int kPanelRows = 8, kPanelVectors = 3;  // the register tile of c takes 24 of 32 registers
constexpr int kPanelColumns = kPanelVectors * kLanes;
constexpr int64_t kLongestInner = 4096;  // a panel of b takes 384 KiB, which fit the L2 cache

// Two consecutive elements along the inner dimension.
typedef uint32_t Pair;

constexpr int64_t pairs_of(int64_t inner) { return (inner + 1) / 2; }

// Stride between packed row panels, in pairs: not a multiple of a page, or all panels would map to the same cache sets.
constexpr int64_t row_panel(int64_t inner) { return padded(pairs_of(inner) * kPanelRows, kLanes) + kLanes; }

// Output c, its bias, and whether to accumulate.
template <typename T>
struct Result {
  T* data;
  int64_t row;
  const BFloat16* bias;  // of every column, or null
  bool add;              // accumulate into c; else overwrite it
};

// Rows of a: read in place if their pairs are contiguous, else packed.
struct Rows {
  const BFloat16* data;
  int64_t row;  // of data
  const Pair* packed;
};

// Whether rows can be read in place.
inline bool read_in_place(const Matrix<BFloat16>& from, int64_t inner) { return from.inner == 1 && inner % 2 == 0; }

// Packs rows first..last-1 and inner elements begin..end-1 into panels of kPanelRows rows, each laid out
// [pairs, kPanelRows]. Missing rows of the last panel and the missing partner of an odd last element are zero.
void pack_rows(const Matrix<BFloat16>& from, int64_t first, int64_t last, int64_t begin, int64_t end, Pair* to);

// The same in panels of kPanelColumns; writes nothing past the last panel.
void pack_columns(const Matrix<BFloat16>& from, int64_t first, int64_t last, int64_t begin, int64_t end, Pair* to);

// c [rows, columns] (+)= a b^T for blocks of `inner` elements, at most kLongestInner.
template <typename T>
void block_product(int64_t rows, int64_t columns, int64_t inner, const Rows& a, const Pair* packed_b,
                   const Result<T>& c);

}  // namespace megads::bf16

#endif
