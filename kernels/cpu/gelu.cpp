#include "gelu.h"

namespace megads {
namespace {

constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

// Beyond it GELU is 0 or x in fp32, and its slope 0 or 1; up to it the exponentials below are finite.
constexpr float kFar = 10.0f;

Floats value(Floats x) {
  const Floats away = exp(x * (-kTwiceRoot) * (1.0f + kCubic * x * x));
  return x < -kFar ? x * 0.0f : x / (1.0f + away);
}

Floats derivative(Floats x) {
  x = x > kFar ? broadcast(kFar) : x;
  x = x < -kFar ? broadcast(-kFar) : x;
  const Floats square = x * x;
  const Floats away = exp(x * (-kTwiceRoot) * (1.0f + kCubic * square));
  const Floats sigmoid = 1.0f / (1.0f + away);
  // 1 - sigmoid without the cancellation where it is small.
  const Floats rest = away * sigmoid;
  return sigmoid + x * sigmoid * rest * (kTwiceRoot * (1.0f + 3.0f * kCubic * square));
}

}  // namespace

template <typename T>
void gelu_forward(const T* x, T* out, int64_t first, int64_t last) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) store(out + i, value(load(x + i)));
  if (i < last) store_some(out + i, value(load_some(x + i, last - i, 0.0f)), last - i);
}

template <typename T>
void gelu_backward(const T* grad, const T* x, T* grad_x, int64_t first, int64_t last) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) store(grad_x + i, load(grad + i) * derivative(load(x + i)));
  if (i < last) {
    const Floats some = load_some(grad + i, last - i, 0.0f) * derivative(load_some(x + i, last - i, 0.0f));
    store_some(grad_x + i, some, last - i);
  }
}

#define MEGADS_INSTANTIATE(T)                                            \
  template void gelu_forward<T>(const T*, T*, int64_t, int64_t);         \
  template void gelu_backward<T>(const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
