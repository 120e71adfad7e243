// Quantization to FP8: operator schemas, argument checks and threading.
#include "float8.h"

#include <algorithm>

#include "../cpu/float8.h"

namespace megads::bindings {
namespace {

// Parts of a group, so that the threads share few and large ones.
struct Parts {
  Parts(int64_t groups, int64_t size)
      : size(size), of_group(std::max<int64_t>(1, (size + kElementsOfOneThread - 1) / kElementsOfOneThread)),
        count(groups * of_group),
        grain(std::max<int64_t>(1, kElementsOfOneThread / std::clamp<int64_t>(size, 1, kElementsOfOneThread))) {}

  int64_t first(int64_t part) const { return part / of_group * size + part % of_group * kElementsOfOneThread; }
  int64_t length(int64_t part) const {
    return std::min(kElementsOfOneThread, size - part % of_group * kElementsOfOneThread);
  }

  int64_t size, of_group, count, grain;
};

template <typename T>
void find_magnitudes(const T* x, const Parts& parts, uint32_t* bits) {
  std::vector<uint32_t> found(parts.count);
  torch::stable::parallel_for(0, parts.count, parts.grain, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part)
      found[part] = largest_magnitude<T>(x + parts.first(part), parts.length(part));
  });
  for (int64_t part = 0; part < parts.count; ++part)
    bits[part / parts.of_group] = std::max(bits[part / parts.of_group], found[part]);
}

template <typename T>
void quantize_groups(Float8 format, const T* x, const Parts& parts, const uint32_t* bits, uint8_t* values,
                     float* inverse) {
  torch::stable::parallel_for(0, parts.count, parts.grain, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t group = part / parts.of_group, at = parts.first(part);
      megads::quantize<T>(format, x + at, parts.length(part), bits[group], values + at);
      if (part % parts.of_group == 0) inverse[group] = inverse_scale(format, bits[group]);
    }
  });
}

Tensor float8_magnitudes(const Tensor& x) {
  require_rows(x);
  Tensor bits = torch::stable::new_zeros(x, std::vector<int64_t>{x.size(0)}, ScalarType::Int);
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    find_magnitudes<T>(data_of<T>(x), Parts(x.size(0), x.size(1)), data_of<uint32_t>(bits));
  });
  return bits;
}

Tensor float8_column_magnitudes(const Tensor& x) {
  require_rows(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor bits = torch::stable::new_zeros(x, std::vector<int64_t>{columns}, ScalarType::Int);
  const int64_t grain = std::max<int64_t>(64, kElementsOfOneThread / std::max<int64_t>(1, rows));
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, columns, grain, [&](int64_t first, int64_t last) {
      column_magnitudes<T>(data_of<T>(x), rows, columns, first, last, data_of<uint32_t>(bits));
    });
  });
  return bits;
}

std::tuple<Tensor, Tensor> float8_quantize(const Tensor& x, const Tensor& bits, int64_t format) {
  require_rows(x);
  require_bits(bits, x.size(0));
  Tensor values = values_like(x, x.size(0), x.size(1), format), inverse = fp32_like(x, {x.size(0)});
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    quantize_groups<T>(Float8(format), data_of<T>(x), Parts(x.size(0), x.size(1)), data_of<uint32_t>(bits),
                       data_of<uint8_t>(values), data_of<float>(inverse));
  });
  return {values, inverse};
}

std::tuple<Tensor, Tensor> float8_quantize_rows(const Tensor& x, int64_t format) {
  return float8_quantize(x, float8_magnitudes(x), format);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> float8_quantize_both(const Tensor& x, const Tensor& row_bits,
                                                                const Tensor& column_bits) {
  require_rows(x);
  require_both_bits(x, row_bits, column_bits);
  const int64_t rows = x.size(0), columns = x.size(1), row_step = row_bits.numel() > 1, step = column_bits.numel() > 1;
  const int64_t e4m3 = int64_t(Float8::e4m3);
  Tensor values = values_like(x, rows, columns, e4m3), transposed = values_like(x, columns, rows, e4m3);
  Tensor row_inverse = fp32_like(x, {row_bits.numel()}), column_inverse = fp32_like(x, {column_bits.numel()});
  const uint32_t *of_rows = data_of<uint32_t>(row_bits), *of_columns = data_of<uint32_t>(column_bits);
  const int64_t grain = std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, columns));
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T* data = data_of<T>(x);
    uint8_t* to = data_of<uint8_t>(values);
    torch::stable::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        megads::quantize<T>(Float8::e4m3, data + row * columns, columns, of_rows[row * row_step], to + row * columns);
    });
    torch::stable::parallel_for(0, columns, 64, [&](int64_t first, int64_t last) {
      quantize_transposed<T>(data, rows, columns, of_columns, step, first, last, data_of<uint8_t>(transposed));
    });
  });
  for (int64_t i = 0; i < row_bits.numel(); ++i)
    data_of<float>(row_inverse)[i] = inverse_scale(Float8::e4m3, of_rows[i]);
  for (int64_t i = 0; i < column_bits.numel(); ++i)
    data_of<float>(column_inverse)[i] = inverse_scale(Float8::e4m3, of_columns[i]);
  return {values, transposed, row_inverse, column_inverse};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("float8_magnitudes(Tensor x) -> Tensor");
  library.def("float8_column_magnitudes(Tensor x) -> Tensor");
  library.def("float8_quantize(Tensor x, Tensor bits, int format) -> (Tensor, Tensor)");
  library.def("float8_quantize_rows(Tensor x, int format) -> (Tensor, Tensor)");
  library.def(
      "float8_quantize_both(Tensor x, Tensor row_bits, Tensor column_bits) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("float8_magnitudes", TORCH_BOX(&megads::bindings::float8_magnitudes));
  library.impl("float8_column_magnitudes", TORCH_BOX(&megads::bindings::float8_column_magnitudes));
  library.impl("float8_quantize", TORCH_BOX(&megads::bindings::float8_quantize));
  library.impl("float8_quantize_rows", TORCH_BOX(&megads::bindings::float8_quantize_rows));
  library.impl("float8_quantize_both", TORCH_BOX(&megads::bindings::float8_quantize_both));
}
