// c (+)= a b^T of bf16 matrices with sums in fp32, by the instruction that multiplies and adds pairs (AVX-512 BF16).
// A panel of b's columns stays in the second cache for all rows of a, and a tile's sums stay in registers over the whole
// inner dimension: nothing but c is written. Denormal numbers count as zero.
#pragma once

#include "gemm_transpose.h"

#if defined(__AVX512BF16__)

#include <algorithm>

namespace megads::bf16 {

constexpr int kPanelRows = 8, kPanelVectors = 3;  // 24 of 32 registers hold a tile of c
constexpr int kPanelColumns = kPanelVectors * kLanes;
constexpr int64_t kLongestInner = 4096;  // a panel of b takes 384 KiB, which fit the second cache

// Two numbers beside each other along the inner dimension.
typedef uint32_t Pair;

constexpr int64_t pairs_of(int64_t inner) { return (inner + 1) / 2; }

// Pairs from one packed panel of rows to the next: no multiple of a page, or all would fall on the same cache lines.
constexpr int64_t row_panel(int64_t inner) { return padded(pairs_of(inner) * kPanelRows, kLanes) + kLanes; }

// Where a tile of c goes.
template <typename T>
struct Result {
  T* data;
  int64_t row;
  const BFloat16* bias;  // of every column, or null
  bool add;              // to what is there; else it is written
};

// The rows of a: as they lie in memory, where their pairs are contiguous, or packed.
struct Rows {
  const BFloat16* data;
  int64_t row;  // of data
  const Pair* packed;
};

// Whether rows can be read as they lie.
inline bool read_in_place(const Matrix<BFloat16>& from, int64_t inner) { return from.inner == 1 && inner % 2 == 0; }

// Packs rows first..last-1 and inner elements begin..end-1: panels of kPanelRows rows, in each of them the rows' pairs
// of one place after those of the other. Rows that the last panel lacks, and the partner that an odd end lacks, are zero.
void pack_rows(const Matrix<BFloat16>& from, int64_t first, int64_t last, int64_t begin, int64_t end, Pair* to);

// The same in panels of kPanelColumns; writes nothing behind them.
void pack_columns(const Matrix<BFloat16>& from, int64_t first, int64_t last, int64_t begin, int64_t end, Pair* to);

// c [rows, columns] (+)= a b^T of blocks of `inner` elements, at most kLongestInner.
template <typename T>
void block_product(int64_t rows, int64_t columns, int64_t inner, const Rows& a, const Pair* packed_b,
                   const Result<T>& c);

}  // namespace megads::bf16

#endif
