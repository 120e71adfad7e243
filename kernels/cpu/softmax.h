// Softmax of scaled attention scores with ALiBi, over the keys from each query's start to its place.
#pragma once

#include "philox.h"

namespace megads {

// Scores are contiguous, [batch, heads, queries, keys].
//   slopes: ALiBi slope of every head, or null.
//   places: position of every query among the keys, [queries]; null: the query's index.
//   starts: first visible key of every query, [batch, queries]; null: 0.
//   dropout: of the probabilities; mask rows are indexed by place, elements by key.
struct MaskedSoftmax {
  int64_t batch, heads, queries, keys;
  float scale;
  const float* slopes;
  const int64_t* places;
  const int64_t* starts;
  DropoutMask dropout;
};

// out = softmax(scale * score + slope * (key - place)) over visible keys, 0 elsewhere, for rows first..last-1 of
// batch * heads * queries. dropped: out after dropout; null without dropout.
template <typename T>
void softmax_forward(const MaskedSoftmax& shape, const T* scores, T* out, T* dropped, int64_t first, int64_t last);

// grad_scores = scale * out * (grad - sum of out * grad), likewise. With dropout grad is the gradient of `dropped`,
// which is recomputed.
template <typename T>
void softmax_backward(const MaskedSoftmax& shape, const T* grad, const T* out, T* grad_scores, T* dropped,
                      int64_t first, int64_t last);

}  // namespace megads
