// GELU of a sum of rows and a bias, which is never stored; see gelu_formula.h.
#pragma once

#include "vector.h"

namespace megads {

// out = gelu(x + bias) of rows first..last-1.
template <typename T>
void bias_gelu_forward(int64_t width, const T* x, const T* bias, T* out, int64_t first, int64_t last);

// grad_x = grad * gelu'(x + bias) of blocks of rows first..last-1 (row_blocks.h); partial, [blocks, width], is each
// block's share of the gradient of the bias.
template <typename T>
void bias_gelu_backward(int64_t rows, int64_t width, const T* grad, const T* x, const T* bias, T* grad_x,
                        float* partial, int64_t first, int64_t last);

}  // namespace megads
