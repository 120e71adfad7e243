// Dropout of hidden states (Srivastava et al. 2014) with an optional fused residual addition.
#pragma once

#include "philox.h"

namespace megads {

// Contiguous hidden states [batch, tokens, width].
//   places: position of every token in its sample, [tokens]; null: the token's index.
//   mask: rows are indexed by place, elements by feature.
struct HiddenDropout {
  int64_t tokens, width;
  const int64_t* places;
  DropoutMask mask;
};

// out = x * factor + residual (null: none) for rows first..last-1 of batch * tokens; factor is 0 for dropped elements
// and the mask's scale for kept ones.
template <typename T>
void dropout(const HiddenDropout& shape, const T* x, const T* residual, T* out, int64_t first, int64_t last);

}  // namespace megads
