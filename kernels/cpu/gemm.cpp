#include "gemm.h"

#include <algorithm>

namespace megads {
namespace {

template <int kWidth, typename T>
void pack_panel(const Matrix<T>& from, const T* data, int64_t rows, int64_t inner, float* to) {
  if (from.inner == 1) return pack_transposed<kWidth>(data, from.row, rows, inner, to);
  for (int64_t k = 0; k < inner; ++k, data += from.inner, to += kWidth) {
    if (from.row == 1 && rows == kWidth) {
      for (int r = 0; r < kWidth; ++r) to[r] = widen(data[r]);
    } else {
      for (int r = 0; r < kWidth; ++r) to[r] = r < rows ? widen(data[r * from.row]) : 0.0f;
    }
  }
}

template <int kWidth, typename T>
void pack(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  for (int64_t row = first; row < last; row += kWidth, to += kWidth * (end - begin)) {
    const T* data = from.data + row * from.row + begin * from.inner;
    pack_panel<kWidth>(from, data, std::min<int64_t>(kWidth, last - row), end - begin, to);
  }
}

inline __attribute__((always_inline)) void tile(int64_t inner, const float* a, const float* b, const float* start,
                                                int64_t start_row, float* to, int64_t to_row) {
  Floats sums[kPanelRows][kPanelVectors] = {};
  for (int64_t k = 0; k < inner; ++k, a += kPanelRows, b += kPanelColumns) {
    Floats of_b[kPanelVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) of_b[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) sums[r][j] += a[r] * of_b[j];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kPanelRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      const Floats sum = start ? load(start + r * start_row + j * kLanes) + sums[r][j] : sums[r][j];
      store(to + r * to_row + j * kLanes, sum);
    }
}

}  // namespace

template <typename T>
void pack_rows(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  pack<kPanelRows>(from, first, last, begin, end, to);
}

template <typename T>
void pack_columns(const Matrix<T>& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  pack<kPanelColumns>(from, first, last, begin, end, to);
}

template void pack_rows(const Matrix<float>&, int64_t, int64_t, int64_t, int64_t, float*);
template void pack_rows(const Matrix<BFloat16>&, int64_t, int64_t, int64_t, int64_t, float*);
template void pack_columns(const Matrix<float>&, int64_t, int64_t, int64_t, int64_t, float*);
template void pack_columns(const Matrix<BFloat16>&, int64_t, int64_t, int64_t, int64_t, float*);

void block_product(int64_t rows, int64_t columns, int64_t inner, const float* packed_a, const float* packed_b,
                   const float* start, int64_t start_row, float* c, int64_t c_row) {
  for (int64_t column = 0; column < columns; column += kPanelColumns) {
    const float* b = packed_b + column * inner;
    const int64_t wide = std::min<int64_t>(kPanelColumns, columns - column);
    for (int64_t row = 0; row < rows; row += kPanelRows) {
      const float* a = packed_a + row * inner;
      const int64_t high = std::min<int64_t>(kPanelRows, rows - row);
      const float* begin = start ? start + row * start_row + column : nullptr;
      float* to = c + row * c_row + column;
      if (wide == kPanelColumns && high == kPanelRows) {
        tile(inner, a, b, begin, start_row, to, c_row);
        continue;
      }
      float room[kPanelRows * kPanelColumns];
      tile(inner, a, b, nullptr, 0, room, kPanelColumns);
      for (int64_t r = 0; r < high; ++r)
        for (int64_t j = 0; j < wide; ++j)
          to[r * c_row + j] = (begin ? begin[r * start_row + j] : 0.0f) + room[r * kPanelColumns + j];
    }
  }
}

}  // namespace megads
