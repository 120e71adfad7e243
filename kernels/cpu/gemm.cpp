#include "gemm.h"

#include <algorithm>

namespace megads {
namespace {

constexpr int kBlock = 8;
typedef float Eight __attribute__((vector_size(kBlock * 4)));
typedef int32_t EightInts __attribute__((vector_size(kBlock * 4)));

inline Eight interleaved_low(Eight x, Eight y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shuffle(x, y, EightInts{0, 8, 1, 9, 2, 10, 3, 11});
#endif
}

inline Eight interleaved_high(Eight x, Eight y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shuffle(x, y, EightInts{4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

// Transposes eight rows. A round turns the bits of an element's place (row, column) by one; three exchange the two.
inline void transpose(Eight (&x)[kBlock]) {
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
    Eight y[kBlock];
#pragma GCC unroll 4
    for (int i = 0; i < kBlock / 2; ++i) {
      y[2 * i] = interleaved_low(x[i], x[i + kBlock / 2]);
      y[2 * i + 1] = interleaved_high(x[i], x[i + kBlock / 2]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) x[i] = y[i];
  }
}

// One panel whose inner elements lie beside each other. A panel's width that is no multiple of eight is written over its
// end, in the order in which what follows is written.
template <int kWidth>
void pack_transposed(const float* data, int64_t row, int64_t rows, int64_t inner, float* to) {
  int64_t k = 0;
  for (; k + kBlock <= inner; k += kBlock)
    for (int group = 0; group < kWidth; group += kBlock) {
      Eight x[kBlock];
#pragma GCC unroll 8
      for (int r = 0; r < kBlock; ++r)
        if (group + r < kWidth && group + r < rows)
          std::memcpy(&x[r], data + (group + r) * row + k, sizeof x[r]);
        else
          x[r] = Eight{};
      transpose(x);
#pragma GCC unroll 8
      for (int j = 0; j < kBlock; ++j) std::memcpy(to + (k + j) * kWidth + group, &x[j], sizeof x[j]);
    }
  for (; k < inner; ++k)
    for (int r = 0; r < kWidth; ++r) to[k * kWidth + r] = r < rows ? data[r * row + k] : 0.0f;
}

template <int kWidth>
void pack_panel(const Operand& from, const float* data, int64_t rows, int64_t inner, float* to) {
  if (from.inner == 1) return pack_transposed<kWidth>(data, from.row, rows, inner, to);
  for (int64_t k = 0; k < inner; ++k, data += from.inner, to += kWidth) {
    if (from.row == 1 && rows == kWidth) {
      std::memcpy(to, data, kWidth * sizeof *to);
    } else {
      for (int r = 0; r < kWidth; ++r) to[r] = r < rows ? data[r * from.row] : 0.0f;
    }
  }
}

template <int kWidth>
void pack(const Operand& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  for (int64_t row = first; row < last; row += kWidth, to += kWidth * (end - begin)) {
    const float* data = from.data + row * from.row + begin * from.inner;
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

void pack_rows(const Operand& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  pack<kPanelRows>(from, first, last, begin, end, to);
}

void pack_columns(const Operand& from, int64_t first, int64_t last, int64_t begin, int64_t end, float* to) {
  pack<kPanelColumns>(from, first, last, begin, end, to);
}

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
