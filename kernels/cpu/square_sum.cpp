#include "square_sum.h"

namespace megads {
namespace {

// Where fp64 takes two registers, half a vector at a time: GCC 12 converts a whole one element by element.
constexpr int kPart = kLanes == 16 ? kLanes : kLanes / 2, kParts = kLanes / kPart;
typedef float PartFloats __attribute__((vector_size(kPart * 4)));
typedef double Doubles __attribute__((vector_size(kPart * 8)));

struct Sums {
  Doubles of_part[kParts] = {};

  void add_squares(Floats x) {
    PartFloats parts[kParts];
    std::memcpy(parts, &x, sizeof x);
    for (int part = 0; part < kParts; ++part) {
      const Doubles wide = __builtin_convertvector(parts[part], Doubles);
      of_part[part] += wide * wide;
    }
  }
};

}  // namespace

double square_sum(const float* x, int64_t first, int64_t last) {
  Sums even, odd;
  int64_t i = first;
  for (; i + 2 * kLanes <= last; i += 2 * kLanes) {
    even.add_squares(load(x + i));
    odd.add_squares(load(x + i + kLanes));
  }
  for (; i < last; i += kLanes) even.add_squares(load_some(x + i, last - i < kLanes ? last - i : kLanes, 0.0f));
  double sum = 0.0;
  for (int part = 0; part < kParts; ++part) {
    const Doubles both = even.of_part[part] + odd.of_part[part];
    for (int lane = 0; lane < kPart; ++lane) sum += both[lane];
  }
  return sum;
}

}  // namespace megads
