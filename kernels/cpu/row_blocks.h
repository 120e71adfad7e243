// Reductions over rows that are bitwise independent of the number of threads: each block of rows is summed separately,
// then the blocks in order. The blocks depend on the number of rows alone.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace megads {

inline int64_t rows_of_block(int64_t rows) {
  constexpr int64_t kMostBlocks = 64, kLeastRows = 16;
  return std::max(kLeastRows, (rows + kMostBlocks - 1) / kMostBlocks);
}

inline int64_t row_blocks(int64_t rows) { return (rows + rows_of_block(rows) - 1) / rows_of_block(rows); }

// sums = sum over blocks of partial, whose blocks are `block_stride` apart, for columns first..last-1.
template <typename T>
inline void add_blocks(int64_t blocks, int64_t block_stride, const float* partial, T* sums, int64_t first,
                       int64_t last) {
  for_vectors(first, last, [&](int64_t c, int count) {
    Floats sum{};
    for (int64_t block = 0; block < blocks; ++block) sum += load_lanes(partial + block * block_stride + c, count);
    store_lanes(sums + c, sum, count);
  });
}

}  // namespace megads
