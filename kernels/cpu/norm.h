// LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019) of rows, optionally of the sum of two
// inputs.
#pragma once

#include "vector.h"

namespace megads {

// Contiguous rows of `width` elements; the mean is subtracted if `centred` (LayerNorm), else not (RMSNorm).
struct Norm {
  int64_t rows, width;
  float eps;
  bool centred;
};

// out = norm(x + residual) * weight + bias for rows first..last-1; residual may be null.
//   added: the sum rounded to T, which is the input of the norm; null without residual.
//   statistics: mean (0 if not centred) and reciprocal standard deviation of every row, [rows, 2].
template <typename T>
void norm_forward(const Norm& shape, const T* x, const T* residual, const T* weight, const T* bias, T* added, T* out,
                  float* statistics, int64_t first, int64_t last);

// Backward pass of blocks first..last-1 (row_blocks.h). x is the input of the norm; grad_added, or null, is the
// gradient of x from its other uses.
//   partial: [blocks, 2, width], each block's partial gradients of weight and bias.
template <typename T>
void norm_backward(const Norm& shape, const T* grad, const T* grad_added, const T* x, const T* weight,
                   const float* statistics, T* grad_x, float* partial, int64_t first, int64_t last);

}  // namespace megads
