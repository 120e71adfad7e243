// LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019) of rows, also of a sum of two inputs.
#pragma once

#include "vector.h"

namespace megads {

// rows of `width` numbers next to each other; `centred` takes the mean off (LayerNorm), else not (RMSNorm).
struct Norm {
  int64_t rows, width;
  float eps;
  bool centred;
};

// out = normed(x + residual) * weight + bias of rows first..last-1; without residual (null) of x.
//   added: the sum as it is stored, which is what is normed; null without residual.
//   statistics: mean (0 where not centred) and reciprocal deviation of every row, [rows, 2].
template <typename T>
void norm_forward(const Norm& shape, const T* x, const T* residual, const T* weight, const T* bias, T* added, T* out,
                  float* statistics, int64_t first, int64_t last);

// Blocks first..last-1 of those of row_blocks.h. x is what was normed; grad_added, or null, is what else arrives at it.
//   partial: [blocks, 2, width], each block's share of the gradients of weight and bias.
template <typename T>
void norm_backward(const Norm& shape, const T* grad, const T* grad_added, const T* x, const T* weight,
                   const float* statistics, T* grad_x, float* partial, int64_t first, int64_t last);

}  // namespace megads
