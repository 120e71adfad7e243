// Softmax of scaled attention scores with ALiBi, over the keys from each query's start to its place.
#pragma once

#include "vector.h"

namespace megads {

// Scores are [batch, heads, queries, keys], next to each other.
//   slopes: ALiBi slope of every head, or null.
//   places: place of every query among the keys, [queries]; null: its own number.
//   starts: first key that a query sees, [batch, queries]; null: 0.
struct MaskedSoftmax {
  int64_t batch, heads, queries, keys;
  float scale;
  const float* slopes;
  const int64_t* places;
  const int64_t* starts;
};

// out = softmax(scale * score + slope * (key - place)) over what a query sees, else 0; rows first..last-1 of the
// batch * heads * queries there are.
template <typename T>
void softmax_forward(const MaskedSoftmax& shape, const T* scores, T* out, int64_t first, int64_t last);

// grad_scores = scale * out * (grad - sum of out * grad), likewise.
template <typename T>
void softmax_backward(const MaskedSoftmax& shape, const T* grad, const T* out, T* grad_scores, int64_t first,
                      int64_t last);

}  // namespace megads
