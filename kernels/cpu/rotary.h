// Rotary position embedding (Su et al. 2021): rotates pairs from the two halves of a head's features by their
// position's angles.
#pragma once

#include "vector.h"

namespace megads {

// x is [batch, tokens, heads, 2 * pairs] with a contiguous last dim and strides in elements; the output is contiguous.
// cos and sin are [tokens, pairs], with batch stride `of_batch` (0: the same for all samples).
struct Rotary {
  int64_t tokens, heads, pairs;
  int64_t batch_stride, token_stride, head_stride;
  const float *cos, *sin;
  int64_t of_batch;
  bool backward;  // rotate by the negative angle
};

// Rotates tokens first..last-1 of batch * tokens.
template <typename T>
void rotary(const Rotary& shape, const T* x, T* out, int64_t first, int64_t last);

}  // namespace megads
