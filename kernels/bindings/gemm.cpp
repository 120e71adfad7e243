// fp32 GEMM of linear layers: operator schema, argument checks and threading.
#include "../cpu/gemm.h"

#include <algorithm>

#include "tensors.h"

namespace megads::bindings {
namespace {

struct Product {
  megads::Matrix<float> a, b;
  const float* bias;
  float* c;
  int64_t rows, columns, inner;
  bool add;
};

// Rows of a that one thread packs and multiplies at a time, chosen to balance the threads.
int64_t row_block(int64_t rows) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t blocks = megads::padded(rows, megads::kRowBlock) / megads::kRowBlock;
  return megads::padded(megads::padded(rows, megads::padded(blocks, threads)) / megads::padded(blocks, threads),
                        megads::kPanelRows);
}

// Columns from..to-1 of c over inner elements begin..end-1. Which thread computes an element does not matter: its sum
// is always over the same blocks in the same order.
void pass(const Product& p, int64_t from, int64_t to, int64_t begin, int64_t end, float* packed_b) {
  const int64_t wide = to - from, inner = end - begin, width = megads::kPanelColumns;
  torch::stable::parallel_for(0, megads::padded(wide, width) / width, 1, [&](int64_t first, int64_t last) {
    megads::pack_columns(p.b, from + first * width, std::min(from + last * width, to), begin, end,
                         packed_b + first * width * inner);
  });
  const int64_t block = row_block(p.rows);
  torch::stable::parallel_for(0, megads::padded(p.rows, block) / block, 1, [&](int64_t first, int64_t last) {
    std::vector<float> packed_a(block * inner + megads::kSlack);
    for (int64_t row = first * block; row < std::min(last * block, p.rows); row += block) {
      const int64_t high = std::min(block, p.rows - row);
      float* c = p.c + row * p.columns + from;
      const bool from_c = p.add || begin > 0;
      const float* start = from_c ? c : p.bias ? p.bias + from : nullptr;
      megads::pack_rows(p.a, row, row + high, begin, end, packed_a.data());
      megads::block_product(high, wide, inner, packed_a.data(), packed_b, start, from_c ? p.columns : 0, c, p.columns);
    }
  });
}

void gemm(const Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, bool add) {
  for (const Tensor* x : {&c, &a, &b})
    require(x->scalar_type() == ScalarType::Float && x->dim() == 2, "a, b and c must be fp32 of two dims");
  const Product p = {{data_of<float>(a), a.stride(0), a.stride(1)}, {data_of<float>(b), b.stride(0), b.stride(1)},
                     optional_data<float>(bias), data_of<float>(c), a.size(0), b.size(0), a.size(1), add};
  require(b.size(1) == p.inner, "a [m, k] and b [n, k] must have the same k");
  require(c.size(0) == p.rows && c.size(1) == p.columns && c.is_contiguous(), "c must be a contiguous [m, n]");
  require(!bias || (bias->scalar_type() == ScalarType::Float && bias->dim() == 1 && bias->size(0) == p.columns &&
                    bias->is_contiguous()), "bias must be contiguous fp32 [n]");
  require(!(bias && add), "a bias and what c holds cannot both be added");
  require(p.inner > 0, "a and b must not be empty");
  const int64_t widest = megads::padded(std::min(p.columns, megads::kColumnBlock), megads::kPanelColumns);
  std::vector<float> packed_b(widest * std::min(p.inner, megads::kInnerBlock));
  for (int64_t from = 0; from < p.columns; from += megads::kColumnBlock)
    for (int64_t begin = 0; begin < p.inner; begin += megads::kInnerBlock)
      pass(p, from, std::min(from + megads::kColumnBlock, p.columns), begin,
           std::min(begin + megads::kInnerBlock, p.inner), packed_b.data());
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("gemm(Tensor(a!) c, Tensor a, Tensor b, Tensor? bias, bool add) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("gemm", TORCH_BOX(&megads::bindings::gemm));
}
