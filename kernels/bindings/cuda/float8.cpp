// Quantization to FP8, on a GPU.
#include "../float8.h"

#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor int32_like(const Tensor& x, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(x, std::vector<int64_t>(sizes), ScalarType::Int);
}

// Workspace of a reduction in two steps.
Tensor partial_like(const Tensor& x, int64_t parts, int64_t groups) {
  return int32_like(x, {parts > 1 ? parts : 0, groups});
}

Tensor float8_magnitudes(const Tensor& x) {
  require_rows(x);
  const int64_t groups = x.size(0), size = x.size(1);
  Tensor bits = int32_like(x, {groups}), partial = partial_like(x, megads_cuda_float8_parts(groups, size), groups);
  const Launch launch(x);
  launch(megads_cuda_float8_magnitudes, number_of_type(x), groups, size, data(x), data(partial),
         data_of<int32_t>(bits));
  return bits;
}

Tensor float8_column_magnitudes(const Tensor& x) {
  require_rows(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor bits = int32_like(x, {columns}), partial = partial_like(x, megads_cuda_float8_column_parts(rows), columns);
  const Launch launch(x);
  launch(megads_cuda_float8_column_magnitudes, number_of_type(x), rows, columns, data(x), data(partial),
         data_of<int32_t>(bits));
  return bits;
}

std::tuple<Tensor, Tensor> float8_quantize(const Tensor& x, const Tensor& bits, int64_t format) {
  require_rows(x);
  require_bits(bits, x.size(0));
  require_together({&x, &bits});
  Tensor values = values_like(x, x.size(0), x.size(1), format), inverse = fp32_like(x, {x.size(0)});
  const Launch launch(x);
  launch(megads_cuda_float8_quantize, number_of_type(x), format, x.size(0), x.size(1), data(x), data_of<int32_t>(bits),
         data(values), data_of<float>(inverse));
  return {values, inverse};
}

std::tuple<Tensor, Tensor> float8_quantize_rows(const Tensor& x, int64_t format) {
  require_rows(x);
  Tensor values = values_like(x, x.size(0), x.size(1), format), inverse = fp32_like(x, {x.size(0)});
  const Launch launch(x);
  launch(megads_cuda_float8_quantize_rows, number_of_type(x), format, x.size(0), x.size(1), data(x), data(values),
         data_of<float>(inverse));
  return {values, inverse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> float8_quantize_both(const Tensor& x, const Tensor& row_bits,
                                                                const Tensor& column_bits) {
  require_rows(x);
  require_both_bits(x, row_bits, column_bits);
  require_together({&x, &row_bits, &column_bits});
  const int64_t rows = x.size(0), columns = x.size(1), e4m3 = MEGADS_E4M3;
  Tensor values = values_like(x, rows, columns, e4m3), transposed = values_like(x, columns, rows, e4m3);
  Tensor row_inverse = fp32_like(x, {row_bits.numel()}), column_inverse = fp32_like(x, {column_bits.numel()});
  const Launch launch(x);
  launch(megads_cuda_float8_quantize_both, number_of_type(x), rows, columns, row_bits.numel(), column_bits.numel(),
         data(x), data_of<int32_t>(row_bits), data_of<int32_t>(column_bits), data(values), data(transposed),
         data_of<float>(row_inverse), data_of<float>(column_inverse));
  return {values, transposed, row_inverse, column_inverse};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("float8_magnitudes", TORCH_BOX(&megads::bindings::float8_magnitudes));
  library.impl("float8_column_magnitudes", TORCH_BOX(&megads::bindings::float8_column_magnitudes));
  library.impl("float8_quantize", TORCH_BOX(&megads::bindings::float8_quantize));
  library.impl("float8_quantize_rows", TORCH_BOX(&megads::bindings::float8_quantize_rows));
  library.impl("float8_quantize_both", TORCH_BOX(&megads::bindings::float8_quantize_both));
}
