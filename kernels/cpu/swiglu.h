// SwiGLU (Shazeer 2020): silu(gate) * up of interleaved (gate, up) pairs.
#pragma once

#include "vector.h"

namespace megads {

// out = gate * sigmoid(gate) * up for pairs first..last-1.
template <typename T>
void swiglu_forward(const T* pairs, T* out, int64_t first, int64_t last);

// Gradients of gate and up, interleaved.
template <typename T>
void swiglu_backward(const T* grad, const T* pairs, T* grad_pairs, int64_t first, int64_t last);

}  // namespace megads
