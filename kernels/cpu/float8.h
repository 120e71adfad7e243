// Quantization to FP8 with power-of-two scales: see megads/ops/float8.py.
#pragma once

#include "vector.h"

namespace megads {

enum class Float8 { e4m3, e5m2 };

// Largest magnitude, as the bits of an fp32 number without its sign; 0 of nothing.
template <typename T>
uint32_t largest_magnitude(const T* x, int64_t count);

// Raises the magnitudes of columns first..last-1 to those of x, [rows, columns].
template <typename T>
void column_magnitudes(const T* x, int64_t rows, int64_t columns, int64_t first, int64_t last, uint32_t* bits);

// Inverse scale of a group with this largest magnitude; NaN if that is infinite or NaN.
float inverse_scale(Float8 format, uint32_t bits);

// x times the scale of its group, rounded to nearest, ties to even.
template <typename T>
void quantize(Float8 format, const T* x, int64_t count, uint32_t bits, uint8_t* values);

// Rows first..last-1 of the transpose of x, [rows, columns], in E4M3. Row i has the magnitude bits[i * step].
template <typename T>
void quantize_transposed(const T* x, int64_t rows, int64_t columns, const uint32_t* bits, int64_t step, int64_t first,
                         int64_t last, uint8_t* transposed);

}  // namespace megads
