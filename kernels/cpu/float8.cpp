#include "float8.h"

#include <algorithm>

namespace megads {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinityBits = 0x7f800000u;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float number_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Exponent bias and mantissa bits of a format, the exponent of its largest number, and the exponent of its spacing of
// subnormal numbers.
struct E4M3 {
  static constexpr int kBias = 7, kMantissa = 3, kTop = 8, kSpacing = -9;
};
struct E5M2 {
  static constexpr int kBias = 15, kMantissa = 2, kTop = 15, kSpacing = -16;
};

// Biased exponent of the inverse scale; 27 keeps the scale finite.
template <typename Format>
uint32_t inverse_exponent(uint32_t bits) {
  return uint32_t(std::max(27, int((bits + 0x1fffffu) >> 23) - Format::kTop));
}

template <typename Format>
float scale_of(uint32_t bits) {
  return bits >= kInfinityBits ? std::numeric_limits<float>::quiet_NaN()
                               : number_of((254 - inverse_exponent<Format>(bits)) << 23);
}

// Rounds a number not above the format's largest. Both cases are computed, so that loops become vector code.
template <typename Format>
inline uint8_t rounded(float x) {
  constexpr int kShift = 23 - Format::kMantissa;
  // Adding this power of two rounds to a multiple of the spacing of subnormal numbers, in the lowest bits of the sum.
  constexpr uint32_t kMagic = uint32_t(127 + 23 + Format::kSpacing) << 23;
  constexpr uint32_t kSmallestNormal = uint32_t(127 + 1 - Format::kBias) << 23;
  const uint32_t bits = bits_of(x), magnitude = bits & kMagnitude;
  const uint32_t small = bits_of(number_of(magnitude) + number_of(kMagic)) - kMagic;
  const uint32_t half = (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1u);
  const uint32_t normal = (magnitude - (uint32_t(127 - Format::kBias) << 23) + half) >> kShift;
  const uint32_t found = (magnitude < kSmallestNormal ? small : normal) | (bits >> 31 << 7);
  return uint8_t(magnitude > kInfinityBits ? 0x7fu : found);
}

template <typename Format, typename T>
void quantize_as(const T* x, int64_t count, uint32_t bits, uint8_t* values) {
  const float scale = scale_of<Format>(bits);
  for (int64_t i = 0; i < count; ++i) values[i] = rounded<Format>(widen(x[i]) * scale);
}

}  // namespace

template <typename T>
uint32_t largest_magnitude(const T* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(widen(x[i])) & kMagnitude);
  return largest;
}

template <typename T>
void column_magnitudes(const T* x, int64_t rows, int64_t columns, int64_t first, int64_t last, uint32_t* bits) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = first; column < last; ++column)
      bits[column] = std::max(bits[column], bits_of(widen(x[row * columns + column])) & kMagnitude);
}

float inverse_scale(Float8 format, uint32_t bits) {
  if (bits >= kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
  return number_of((format == Float8::e4m3 ? inverse_exponent<E4M3>(bits) : inverse_exponent<E5M2>(bits)) << 23);
}

template <typename T>
void quantize(Float8 format, const T* x, int64_t count, uint32_t bits, uint8_t* values) {
  if (format == Float8::e4m3)
    quantize_as<E4M3>(x, count, bits, values);
  else
    quantize_as<E5M2>(x, count, bits, values);
}

template <typename T>
void quantize_transposed(const T* x, int64_t rows, int64_t columns, const uint32_t* bits, int64_t step, int64_t first,
                         int64_t last, uint8_t* transposed) {
  constexpr int64_t kTile = 64;  // so that the cache holds the rows that are written
  for (int64_t start = 0; start < rows; start += kTile)
    for (int64_t column = first; column < last; ++column) {
      const float scale = scale_of<E4M3>(bits[column * step]);
      for (int64_t row = start; row < std::min(start + kTile, rows); ++row)
        transposed[column * rows + row] = rounded<E4M3>(widen(x[row * columns + column]) * scale);
    }
}

#define MEGADS_INSTANTIATE(T)                                                                                       \
  template uint32_t largest_magnitude<T>(const T*, int64_t);                                                        \
  template void column_magnitudes<T>(const T*, int64_t, int64_t, int64_t, int64_t, uint32_t*);                      \
  template void quantize<T>(Float8, const T*, int64_t, uint32_t, uint8_t*);                                         \
  template void quantize_transposed<T>(const T*, int64_t, int64_t, const uint32_t*, int64_t, int64_t, int64_t,      \
                                       uint8_t*);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
