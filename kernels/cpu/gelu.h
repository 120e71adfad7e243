// The tanh approximation of GELU (Hendrycks and Gimpel 2016) as x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
#pragma once

#include "vector.h"

namespace megads {

// out = gelu(x) for elements first..last-1.
template <typename T>
void gelu_forward(const T* x, T* out, int64_t first, int64_t last);

// grad_x = grad * gelu'(x) for elements first..last-1.
template <typename T>
void gelu_backward(const T* grad, const T* x, T* grad_x, int64_t first, int64_t last);

}  // namespace megads
