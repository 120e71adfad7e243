// Turns the halves of a head's features, as points in the plane, by the angles of their positions (Su et al. 2021).
#pragma once

#include "vector.h"

namespace megads {

// x is [batch, tokens, heads, 2 * pairs] whose last dim is contiguous, strides in elements; what is written lies next to
// each other. Cosines and sines are [tokens, pairs], `of_batch` elements further on for every sample (0: the same).
struct Rotary {
  int64_t tokens, heads, pairs;
  int64_t batch_stride, token_stride, head_stride;
  const float *cos, *sin;
  int64_t of_batch;
  bool backward;  // the other way round
};

// Turns tokens first..last-1 of the batch * tokens there are.
template <typename T>
void rotary(const Rotary& shape, const T* x, T* out, int64_t first, int64_t last);

}  // namespace megads
