// Sums of squares of pieces of a flat tensor: operator schema, argument checks and threading.
#include <algorithm>

#include "../cpu/square_sum.h"
#include "tensors.h"

namespace megads::bindings {
namespace {

// Each block is summed separately, then the blocks in order: the result does not depend on the number of threads.
constexpr int64_t kBlock = kElementsOfOneThread;

struct Block {
  int64_t piece, first, last;
};

Tensor square_sums(const Tensor& flat, const Tensor& bounds) {
  require(flat.scalar_type() == ScalarType::Float && flat.dim() == 1 && flat.is_contiguous(),
          "flat must be contiguous fp32 of one dim");
  require(bounds.scalar_type() == ScalarType::Long && bounds.dim() == 2 && bounds.size(1) == 2 &&
              bounds.is_contiguous(), "bounds must be a contiguous int64 [pieces, 2]");
  const int64_t pieces = bounds.size(0);
  const int64_t* bound = data_of<int64_t>(bounds);
  std::vector<Block> blocks;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t start = bound[2 * piece], stop = bound[2 * piece + 1];
    require(0 <= start && start <= stop && stop <= flat.numel(), "bounds must be within flat");
    for (int64_t first = start; first < stop; first += kBlock)
      blocks.push_back({piece, first, std::min(first + kBlock, stop)});
  }
  std::vector<double> partial(blocks.size());
  const float* data = data_of<float>(flat);
  torch::stable::parallel_for(0, int64_t(blocks.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) partial[b] = megads::square_sum(data, blocks[b].first, blocks[b].last);
  });
  Tensor sums = torch::stable::new_zeros(flat, std::vector<int64_t>{pieces}, ScalarType::Double);
  double* sum = data_of<double>(sums);
  for (size_t b = 0; b < blocks.size(); ++b) sum[blocks[b].piece] += partial[b];
  return sums;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("square_sums(Tensor flat, Tensor bounds) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("square_sums", TORCH_BOX(&megads::bindings::square_sums));
}
