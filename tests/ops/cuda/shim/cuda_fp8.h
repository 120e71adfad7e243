// FP8 for the CPU, to nearest, ties to even; a NaN is 0x7f; see cuda_runtime.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
typedef uint16_t __nv_fp8x2_storage_t;

namespace shim {

inline unsigned to_fp8(float x, __nv_fp8_interpretation_t kind) {
  const int mantissa = kind == __NV_E4M3 ? 3 : 2, smallest = kind == __NV_E4M3 ? -6 : -14;
  const unsigned largest = kind == __NV_E4M3 ? 0x7e : 0x7b, sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = x == 0 || exponent - 1 < smallest ? smallest : exponent - 1;
  // Spacings from the number 2^exponent, or from 0; a carry into the next exponent takes the next code.
  const double spacings = std::nearbyint(std::ldexp(std::fabs(double(x)), mantissa - exponent));
  const double code = spacings + double((exponent - smallest) << mantissa);
  return sign | (code < largest ? unsigned(code) : largest);
}

}  // namespace shim

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
  return __nv_fp8x2_storage_t(shim::to_fp8(x.x, kind) | shim::to_fp8(x.y, kind) << 8);
}
