#include "swiglu.h"

#include "lanes.h"

namespace megads {
namespace {


struct Pairs {
  Floats gate, up;
};

// Lane i of the result is lane numbers[i] of x and y concatenated.
inline Floats pick(Floats x, Floats y, Ints numbers) {
#if defined(__clang__)
  Floats picked;
  for (int lane = 0; lane < kLanes; ++lane)
    picked[lane] = numbers[lane] < kLanes ? x[numbers[lane]] : y[numbers[lane] - kLanes];
  return picked;
#else
  return __builtin_shuffle(x, y, numbers);
#endif
}

template <typename T>
inline __attribute__((always_inline)) Pairs load_pairs(const T* from, int count) {
  const Ints lanes = lane_numbers();
  const int first = count * 2 < kLanes ? count * 2 : kLanes;
  const Floats x = load_lanes(from, first), y = load_lanes(from + first, 2 * count - first);
  return {pick(x, y, 2 * lanes), pick(x, y, 2 * lanes + 1)};
}

template <typename T>
inline __attribute__((always_inline)) void store_pairs(T* to, Pairs pairs, int count) {
  const Ints lanes = lane_numbers(), sides = (lanes & 1) * kLanes;
  const int first = count * 2 < kLanes ? count * 2 : kLanes;
  store_lanes(to, pick(pairs.gate, pairs.up, lanes / 2 + sides), first);
  store_lanes(to + first, pick(pairs.gate, pairs.up, lanes / 2 + kLanes / 2 + sides), 2 * count - first);
}

// x is clamped so that exp(-x) stays finite.
inline Floats sigmoid(Floats x) {
  x = x < -87.0f ? broadcast(-87.0f) : x;
  return 1.0f / (1.0f + exp(-x));
}

}  // namespace

template <typename T>
void swiglu_forward(const T* pairs, T* out, int64_t first, int64_t last) {
  for_vectors(first, last, [&](int64_t i, int count) {
    const Pairs x = load_pairs(pairs + 2 * i, count);
    store_lanes(out + i, x.gate * sigmoid(x.gate) * x.up, count);
  });
}

template <typename T>
void swiglu_backward(const T* grad, const T* pairs, T* grad_pairs, int64_t first, int64_t last) {
  for_vectors(first, last, [&](int64_t i, int count) {
    const Pairs x = load_pairs(pairs + 2 * i, count);
    const Floats g = load_lanes(grad + i, count), s = sigmoid(x.gate);
    const Floats silu = x.gate * s;
    store_pairs(grad_pairs + 2 * i, {g * x.up * (s + silu * (1.0f - s)), g * silu}, count);
  });
}

#define MEGADS_INSTANTIATE(T)                                                     \
  template void swiglu_forward<T>(const T*, T*, int64_t, int64_t);                \
  template void swiglu_backward<T>(const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
