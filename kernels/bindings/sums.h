// Sums the partial results of row blocks.
#pragma once

#include <algorithm>

#include "../cpu/row_blocks.h"
#include "tensors.h"

namespace megads::bindings {

// sums [width] = sum over blocks of partial [blocks, kinds, width] at one kind.
template <typename T>
void add_blocks_of(const Tensor& partial, int64_t kind, const Tensor& sums) {
  const int64_t blocks = partial.size(0), kinds = partial.size(1), width = partial.size(2);
  const int64_t vectors = (width + kLanes - 1) / kLanes;
  const int64_t grain = std::max<int64_t>(1, kElementsOfOneThread / (kLanes * std::max<int64_t>(1, blocks)));
  torch::stable::parallel_for(0, vectors, grain, [&](int64_t first, int64_t last) {
    add_blocks<T>(blocks, kinds * width, data_of<float>(partial) + kind * width, data_of<T>(sums), first * kLanes,
                  std::min(last * kLanes, width));
  });
}

}  // namespace megads::bindings
