// Sums of squares of fp32 elements, in fp64: they neither overflow nor lose small summands.
#pragma once

#include "vector.h"

namespace megads {

// Elements first..last-1; the summation order depends on their number alone.
double square_sum(const float* x, int64_t first, int64_t last);

}  // namespace megads
