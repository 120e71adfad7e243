// Sums of squares of fp32 numbers, in fp64: they neither overflow nor lose small summands.
#pragma once

#include "vector.h"

namespace megads {

// Elements first..last-1; the order of the additions follows from their number alone.
double square_sum(const float* x, int64_t first, int64_t last);

}  // namespace megads
