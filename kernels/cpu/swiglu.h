// silu(gate) * up (Shazeer 2020) of pairs (gate, up) that lie next to each other.
#pragma once

#include "vector.h"

namespace megads {

// out = gate * sigmoid(gate) * up, pairs first..last-1.
template <typename T>
void swiglu_forward(const T* pairs, T* out, int64_t first, int64_t last);

// Gradients of both of every pair, as pairs.
template <typename T>
void swiglu_backward(const T* grad, const T* pairs, T* grad_pairs, int64_t first, int64_t last);

}  // namespace megads
