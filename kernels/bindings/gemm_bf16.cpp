// bf16 GEMM of linear layers: operator schema, argument checks and threading.
#include "../cpu/gemm_bf16.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "../cpu/gemm.h"
#include "tensors.h"

namespace megads::bindings {
namespace {

template <typename T>
struct Product {
  megads::Matrix<BFloat16> a, b;
  const BFloat16* bias;
  T* c;
  int64_t rows, columns, inner;
  bool add;
};

void round_row(BFloat16* to, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_some(to + i, load_some(from + i, count - i, 0.0f), count - i);
}

#if defined(__AVX512BF16__)

using bf16::Pair;

constexpr int64_t kPackedPairs = 1 << 21;  // of b at a time: 8 MiB
constexpr int64_t kRowsAtOnce = 256;       // of a at a time, per thread
constexpr int64_t kPackedInner = 2048;     // inner elements per pass if a is packed
constexpr int64_t kLongestInner = bf16::kLongestInner;

struct Free {
  void operator()(Pair* room) const { std::free(room); }
};

// Uninitialized memory, aligned to a cache line.
std::unique_ptr<Pair, Free> room_for(int64_t pairs) {
  constexpr int64_t kLine = 64;
  auto* room = static_cast<Pair*>(std::aligned_alloc(kLine, megads::padded(pairs * int64_t(sizeof(Pair)), kLine)));
  if (!room) throw std::bad_alloc();
  return std::unique_ptr<Pair, Free>(room);
}

// Inner elements per pass over c.
int64_t longest_pass(const megads::Matrix<BFloat16>& a, int64_t inner) {
  return bf16::read_in_place(a, inner) ? kLongestInner : kPackedInner;
}

// Columns from..to-1 of c over inner elements begin..end-1. Which thread computes an element does not matter: its sum
// is always over the same elements in the same order.
template <typename T>
void pass(const Product<T>& p, int64_t from, int64_t to, int64_t begin, int64_t end, Pair* packed_b) {
  const int64_t wide = to - from, inner = end - begin, width = bf16::kPanelColumns, height = bf16::kPanelRows;
  torch::stable::parallel_for(0, megads::padded(wide, width) / width, 1, [&](int64_t first, int64_t last) {
    bf16::pack_columns(p.b, from + first * width, std::min(from + last * width, to), begin, end,
                       packed_b + first * width * bf16::pairs_of(inner));
  });
  const bool in_place = bf16::read_in_place(p.a, inner), add = p.add || begin > 0;
  torch::stable::parallel_for(0, megads::padded(p.rows, height) / height, 1, [&](int64_t first, int64_t last) {
    const int64_t start = first * height, stop = std::min(last * height, p.rows);
    const int64_t block = std::min(stop - start, kRowsAtOnce);
    const auto packed_a = room_for(in_place ? 0 : megads::padded(block, height) / height * bf16::row_panel(inner));
    for (int64_t row = start; row < stop; row += block) {
      const int64_t high = std::min(block, stop - row);
      if (!in_place) bf16::pack_rows(p.a, row, row + high, begin, end, packed_a.get());
      const bf16::Rows rows = {p.a.data + row * p.a.row + begin * p.a.inner, p.a.row,
                               in_place ? nullptr : packed_a.get()};
      bf16::block_product<T>(high, wide, inner, rows, packed_b,
                             {p.c + row * p.columns + from, p.columns, add || !p.bias ? nullptr : p.bias + from, add});
    }
  });
}

template <typename T>
void multiply(const Product<T>& p, int64_t longest) {
  // Passes of equal length, in whole pairs.
  const int64_t passes = megads::padded(p.inner, longest) / longest;
  const int64_t inner = megads::padded(megads::padded(p.inner, passes) / passes, 2);
  const int64_t most = std::max(kPackedPairs / bf16::pairs_of(inner) / bf16::kPanelColumns, int64_t(1));
  const int64_t columns = std::min(most * bf16::kPanelColumns, megads::padded(p.columns, bf16::kPanelColumns));
  const auto packed_b = room_for(columns * bf16::pairs_of(inner));
  for (int64_t from = 0; from < p.columns; from += columns)
    for (int64_t begin = 0; begin < p.inner; begin += inner)
      pass(p, from, std::min(from + columns, p.columns), begin, std::min(begin + inner, p.inner), packed_b.get());
}

#else

constexpr int64_t kLongestInner = 4096;
constexpr int64_t kColumns = 512;  // of b, packed at a time: 8 MiB with kLongestInner

int64_t longest_pass(const megads::Matrix<BFloat16>&, int64_t) { return kLongestInner; }

// Columns from..to-1 of c over inner elements begin..end-1, in fp32. Which thread computes an element does not matter:
// its sum is always over the same blocks in the same order.
template <typename T>
void pass(const Product<T>& p, const float* bias, int64_t from, int64_t to, int64_t begin, int64_t end,
          float* packed_b) {
  const int64_t wide = to - from, width = megads::kPanelColumns, height = megads::kPanelRows;
  const int64_t panels = megads::padded(wide, width) / width;
  const auto block_end = [&](int64_t k) { return std::min(k + megads::kInnerBlock, end); };
  const auto packed_at = [&](int64_t k) { return packed_b + (k - begin) * panels * width; };
  torch::stable::parallel_for(0, panels, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = begin; k < end; k = block_end(k))
      megads::pack_columns(p.b, from + first * width, std::min(from + last * width, to), k, block_end(k),
                           packed_at(k) + first * width * (block_end(k) - k));
  });
  torch::stable::parallel_for(0, megads::padded(p.rows, height) / height, 1, [&](int64_t first, int64_t last) {
    const int64_t stop = std::min(last * height, p.rows);
    std::vector<float> packed_a(megads::kRowBlock * megads::kInnerBlock + megads::kSlack);
    std::vector<float> sums(std::is_same_v<T, float> ? 0 : megads::kRowBlock * wide);
    for (int64_t row = first * height; row < stop; row += megads::kRowBlock) {
      const int64_t high = std::min(megads::kRowBlock, stop - row);
      T* to_c = p.c + row * p.columns + from;
      float* c = sums.data();
      if constexpr (std::is_same_v<T, float>) c = to_c;
      const int64_t c_row = std::is_same_v<T, float> ? p.columns : wide;
      for (int64_t k = begin; k < end; k = block_end(k)) {
        const bool from_c = k > begin || (std::is_same_v<T, float> && (p.add || begin > 0));
        megads::pack_rows(p.a, row, row + high, k, block_end(k), packed_a.data());
        megads::block_product(high, wide, block_end(k) - k, packed_a.data(), packed_at(k),
                              from_c ? c : bias ? bias + from : nullptr, from_c ? c_row : 0, c, c_row);
      }
      if constexpr (!std::is_same_v<T, float>)
        for (int64_t r = 0; r < high; ++r) round_row(to_c + r * p.columns, c + r * wide, wide);
    }
  });
}

// For processors without bf16 multiplication: converts the operands to fp32 while packing.
template <typename T>
void multiply(const Product<T>& p, int64_t longest) {
  std::vector<float> bias(p.bias ? p.columns : 0);
  for (size_t column = 0; column < bias.size(); ++column) bias[column] = widen(p.bias[column]);
  const int64_t widest = megads::padded(std::min(p.columns, kColumns), megads::kPanelColumns);
  std::vector<float> packed_b(widest * std::min(p.inner, longest));
  for (int64_t from = 0; from < p.columns; from += kColumns)
    for (int64_t begin = 0; begin < p.inner; begin += longest)
      pass(p, p.bias ? bias.data() : nullptr, from, std::min(from + kColumns, p.columns), begin,
           std::min(begin + longest, p.inner), packed_b.data());
}

#endif

void round_to(BFloat16* to, const float* from, int64_t count) {
  torch::stable::parallel_for(0, count, kElementsOfOneThread, [&](int64_t first, int64_t last) {
    round_row(to + first, from + first, last - first);
  });
}

void run(const Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, bool add) {
  const megads::Matrix<BFloat16> of_a = {data_of<BFloat16>(a), a.stride(0), a.stride(1)};
  const megads::Matrix<BFloat16> of_b = {data_of<BFloat16>(b), b.stride(0), b.stride(1)};
  const auto* of_bias = optional_data<BFloat16>(bias);
  const int64_t rows = a.size(0), columns = b.size(0), inner = a.size(1);
  const int64_t longest = longest_pass(of_a, inner);
  if (c.scalar_type() == ScalarType::Float)
    return multiply<float>({of_a, of_b, of_bias, data_of<float>(c), rows, columns, inner, add}, longest);
  if (inner <= kLongestInner)
    return multiply<BFloat16>({of_a, of_b, of_bias, data_of<BFloat16>(c), rows, columns, inner, false}, kLongestInner);
  // Several passes over c, which must not be rounded between them.
  const Tensor wide = fp32_like(c, {rows, columns});
  multiply<float>({of_a, of_b, of_bias, data_of<float>(wide), rows, columns, inner, false}, longest);
  round_to(data_of<BFloat16>(c), data_of<float>(wide), rows * columns);
}

void gemm_bf16(const Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, bool add) {
  for (const Tensor* x : {&c, &a, &b}) require(x->dim() == 2, "a, b and c must be of two dims");
  require(a.scalar_type() == ScalarType::BFloat16 && b.scalar_type() == ScalarType::BFloat16, "a and b must be bf16");
  require(c.scalar_type() == ScalarType::BFloat16 || c.scalar_type() == ScalarType::Float, "c must be bf16 or fp32");
  require(b.size(1) == a.size(1), "a [m, k] and b [n, k] must have the same k");
  require(c.size(0) == a.size(0) && c.size(1) == b.size(0) && c.is_contiguous(), "c must be a contiguous [m, n]");
  require(!bias || (bias->scalar_type() == ScalarType::BFloat16 && bias->dim() == 1 && bias->size(0) == c.size(1) &&
                    bias->is_contiguous()), "bias must be contiguous bf16 [n]");
  require(!(bias && add), "a bias and what c holds cannot both be added");
  require(!add || c.scalar_type() == ScalarType::Float, "only an fp32 c can be added to");
  require(a.numel() > 0 && b.numel() > 0, "a and b must not be empty");
  run(c, a, b, bias, add);
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("gemm_bf16(Tensor(a!) c, Tensor a, Tensor b, Tensor? bias, bool add) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("gemm_bf16", TORCH_BOX(&megads::bindings::gemm_bf16));
}
