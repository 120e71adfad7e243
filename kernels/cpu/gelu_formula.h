// The tanh approximation of GELU (Hendrycks and Gimpel 2016) and its derivative, as x * sigmoid(2 u).
#pragma once

#include "vector.h"

namespace megads {

constexpr float kGeluTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

// Beyond +-kGeluFar GELU is 0 or x in fp32 and its derivative 0 or 1; within it the exponentials below are finite.
constexpr float kGeluFar = 10.0f;

// RoundedTo: type of the result (exp_for).
template <typename RoundedTo>
inline Floats gelu(Floats x) {
  const Floats away = exp_for<RoundedTo>(x * (-kGeluTwiceRoot) * (1.0f + kGeluCubic * x * x));
#if defined(__AVX512F__)
  return x < -kGeluFar ? x * 0.0f : x / (1.0f + away);
#else
  return x / (1.0f + away);  // exp is infinite below -kGeluFar
#endif
}

template <typename RoundedTo>
inline Floats gelu_slope(Floats x) {
  x = smaller(broadcast(kGeluFar), x);
  x = larger(broadcast(-kGeluFar), x);
  const Floats square = x * x;
  const Floats away = exp_for<RoundedTo>(x * (-kGeluTwiceRoot) * (1.0f + kGeluCubic * square));
  const Floats sigmoid = 1.0f / (1.0f + away);
  // 1 - sigmoid, without cancellation where it is small.
  const Floats rest = away * sigmoid;
  return sigmoid + x * sigmoid * rest * (kGeluTwiceRoot * (1.0f + 3.0f * kGeluCubic * square));
}

}  // namespace megads
