#include "square_sum.h"

namespace megads {
namespace {

typedef double Doubles __attribute__((vector_size(kLanes * 8)));

Doubles squares(Floats x) {
  const Doubles wide = __builtin_convertvector(x, Doubles);
  return wide * wide;
}

}  // namespace

double square_sum(const float* x, int64_t first, int64_t last) {
  Doubles even = {}, odd = {};
  int64_t i = first;
  for (; i + 2 * kLanes <= last; i += 2 * kLanes) {
    even += squares(load(x + i));
    odd += squares(load(x + i + kLanes));
  }
  for (; i < last; i += kLanes) even += squares(load_some(x + i, last - i < kLanes ? last - i : kLanes, 0.0f));
  even += odd;
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) sum += even[lane];
  return sum;
}

}  // namespace megads
