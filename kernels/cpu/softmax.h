// Softmax of scaled attention scores with ALiBi, over the keys from each query's start to its place.
#pragma once

#include "philox.h"

namespace megads {

// Scores are [batch, heads, queries, keys], next to each other.
//   slopes: ALiBi slope of every head, or null.
//   places: place of every query among the keys, [queries]; null: its own number.
//   starts: first key that a query sees, [batch, queries]; null: 0.
//   dropout: of the probabilities; its rows are those of places, its elements keys.
struct MaskedSoftmax {
  int64_t batch, heads, queries, keys;
  float scale;
  const float* slopes;
  const int64_t* places;
  const int64_t* starts;
  DropoutMask dropout;
};

// out = softmax(scale * score + slope * (key - place)) over what a query sees, else 0; rows first..last-1 of the
// batch * heads * queries there are. dropped: out with dropout; null where there is none.
template <typename T>
void softmax_forward(const MaskedSoftmax& shape, const T* scores, T* out, T* dropped, int64_t first, int64_t last);

// grad_scores = scale * out * (grad - sum of out * grad), likewise. With dropout grad is that of `dropped`, which is made
// again.
template <typename T>
void softmax_backward(const MaskedSoftmax& shape, const T* grad, const T* out, T* grad_scores, T* dropped,
                      int64_t first, int64_t last);

}  // namespace megads
