// GELU of x + bias without storing the sum; see gelu_formula.h.
#pragma once

#include "vector.h"

namespace megads {

// out = gelu(x + bias) for rows first..last-1.
template <typename T>
void bias_gelu_forward(int64_t width, const T* x, const T* bias, T* out, int64_t first, int64_t last);

// grad_x = grad * gelu'(x + bias) for blocks of rows first..last-1 (row_blocks.h); partial, [blocks, width], receives
// each block's partial gradient of the bias.
template <typename T>
void bias_gelu_backward(int64_t rows, int64_t width, const T* grad, const T* x, const T* bias, T* grad_x,
                        float* partial, int64_t first, int64_t last);

}  // namespace megads
