// Applies the mask of a dropout, and adds what the result is added to (Srivastava et al. 2014).
#pragma once

#include "vector.h"

namespace megads {

// out = x * keep * scale + residual (null: none), elements first..last-1; keep is 0 or 1.
template <typename T>
void dropout(const T* x, const uint8_t* keep, float scale, const T* residual, T* out, int64_t first, int64_t last);

}  // namespace megads
