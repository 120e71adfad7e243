// Dropout of hidden states, and the sum with what the result is added to (Srivastava et al. 2014).
#pragma once

#include "philox.h"

namespace megads {

// Hidden states [batch, tokens, width], next to each other.
//   places: place of every token in its sample, [tokens]; null: its own number.
//   mask: its rows are those of places, its elements features.
struct HiddenDropout {
  int64_t tokens, width;
  const int64_t* places;
  DropoutMask mask;
};

// out = x * factor + residual (null: none), rows first..last-1 of the batch * tokens there are; the factor is 0 for what
// is dropped, else the scale of the mask.
template <typename T>
void dropout(const HiddenDropout& shape, const T* x, const T* residual, T* out, int64_t first, int64_t last);

}  // namespace megads
