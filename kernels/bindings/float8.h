// Arguments and results of quantization, for both devices.
#pragma once

#include "tensors.h"

namespace megads::bindings {

inline void require_rows(const Tensor& x) {
  require(x.dim() == 2 && x.is_contiguous(), "x must be contiguous and of two dims");
}

inline void require_bits(const Tensor& bits, int64_t groups) {
  require(bits.scalar_type() == ScalarType::Int && bits.is_contiguous() && bits.numel() == groups,
          "magnitudes must be contiguous int32, one for each group");
}

inline void require_both_bits(const Tensor& x, const Tensor& row_bits, const Tensor& column_bits) {
  require_bits(row_bits, row_bits.numel() == 1 ? 1 : x.size(0));
  require_bits(column_bits, column_bits.numel() == 1 ? 1 : x.size(1));
}

// An uninitialized FP8 tensor, format 0: E4M3, 1: E5M2.
inline Tensor values_like(const Tensor& x, int64_t rows, int64_t columns, int64_t format) {
  require(format == 0 || format == 1, "the format must be 0 (E4M3) or 1 (E5M2)");
  return torch::stable::new_empty(x, std::vector<int64_t>{rows, columns},
                                  format == 0 ? ScalarType::Float8_e4m3fn : ScalarType::Float8_e5m2);
}

}  // namespace megads::bindings
