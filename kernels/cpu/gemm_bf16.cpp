#include "gemm_bf16.h"

#if defined(__AVX512BF16__)

namespace megads::bf16 {
namespace {

// Pairs per cache block of b, 128 KiB: all rows of a are multiplied by one block before the next.
constexpr int64_t kCached = 1 << 15;
constexpr int64_t kAtOnce = 2 * kLanes;
constexpr int64_t kTogether = 4;

inline Pair paired(const BFloat16* even, const BFloat16* odd) {
  return Pair(even->bits) | (odd ? Pair(odd->bits) << 16 : 0);
}

// Pairs of 32 elements of two rows. A null second row is zero; `some` masks the valid elements.
struct Interleaved {
  __m512i low, high;
};

inline Interleaved interleaved(const BFloat16* even, const BFloat16* odd, __mmask32 some) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i places = _mm512_load_si512(kLow), x = _mm512_maskz_loadu_epi16(some, even);
  const __m512i y = odd ? _mm512_maskz_loadu_epi16(some, odd) : _mm512_setzero_si512();
  return {_mm512_permutex2var_epi16(x, places, y),
          _mm512_permutex2var_epi16(x, _mm512_add_epi16(places, _mm512_set1_epi16(16)), y)};
}

inline __mmask32 first_of(int64_t count) {
  return __mmask32((uint64_t(1) << std::clamp<int64_t>(count, 0, kAtOnce)) - 1u);
}

// Packs row panels if rows are adjacent in memory (from.row == 1): kTogether pairs of all panels before the next ones,
// so that few memory rows of `from`, which may be pages apart, are read at a time.
void pack_beside_rows(const Matrix<BFloat16>& from, int64_t rows, int64_t inner, Pair* to) {
  const int64_t pairs = pairs_of(inner), panel = row_panel(inner);
  for (int64_t begin = 0; begin < pairs; begin += kTogether)
    for (int64_t row = 0; row < rows; row += kAtOnce) {
      const __mmask32 some = first_of(rows - row);
      for (int64_t k = begin; k < std::min(begin + kTogether, pairs); ++k) {
        const BFloat16* even = from.data + row + 2 * k * from.inner;
        const Interleaved x = interleaved(even, 2 * k + 1 < inner ? even + from.inner : nullptr, some);
        _mm_prefetch((const char*)(even + 2 * kTogether * from.inner), _MM_HINT_T0);
        _mm_prefetch((const char*)(even + (2 * kTogether + 1) * from.inner), _MM_HINT_T0);
        const __m256i parts[] = {_mm512_castsi512_si256(x.low), _mm512_extracti64x4_epi64(x.low, 1),
                                 _mm512_castsi512_si256(x.high), _mm512_extracti64x4_epi64(x.high, 1)};
        Pair* at = to + row / kPanelRows * panel + k * kPanelRows;
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part)
          if (row + part * kPanelRows < rows) std::memcpy(at + part * panel, &parts[part], sizeof parts[part]);
      }
    }
}

void pack_beside_columns(const Matrix<BFloat16>& from, int64_t columns, int64_t inner, Pair* to) {
  const int64_t pairs = pairs_of(inner);
  for (int64_t begin = 0; begin < pairs; begin += kTogether)
    for (int64_t column = 0; column < columns; column += kPanelColumns)
      for (int64_t k = begin; k < std::min(begin + kTogether, pairs); ++k) {
        const BFloat16* even = from.data + column + 2 * k * from.inner;
        const BFloat16* odd = 2 * k + 1 < inner ? even + from.inner : nullptr;
        const Interleaved first = interleaved(even, odd, first_of(columns - column));
        Pair* at = to + column * pairs + k * kPanelColumns;
        _mm512_storeu_si512(at, first.low);
        _mm512_storeu_si512(at + kLanes, first.high);
        const __mmask32 some = first_of(columns - column - kAtOnce);
        const Interleaved rest = interleaved(even + kAtOnce, odd ? odd + kAtOnce : nullptr, some);
        _mm512_storeu_si512(at + 2 * kLanes, rest.low);
        for (int64_t row : {0, 1}) {
          const BFloat16* next = even + (2 * kTogether + row) * from.inner;
          _mm_prefetch((const char*)next, _MM_HINT_T0);
          _mm_prefetch((const char*)(next + kAtOnce), _MM_HINT_T0);
        }
      }
}

// Packs one panel of a matrix with any strides.
template <int kWidth>
void pack_panel(const Matrix<BFloat16>& from, int64_t rows, int64_t inner, Pair* to) {
  int64_t k = 0;
  if (from.inner == 1) {
    pack_transposed<kWidth>(from.data, from.row, rows, inner / 2, to);
    k = inner / 2 * 2;
  }
  for (; k < inner; k += 2)
    for (int r = 0; r < kWidth; ++r) {
      const BFloat16* even = from.data + r * from.row + k * from.inner;
      to[k / 2 * kWidth + r] = r < rows ? paired(even, k + 1 < inner ? even + from.inner : nullptr) : 0;
    }
}

// A row panel, in place or packed, and the distance to the next one, in elements or pairs.
struct RowPanel {
  const BFloat16* rows[kPanelRows];
  const Pair* packed;
  int64_t next;
};

// Register tile of c, kVectors vectors wide: the product of a row panel and a column panel.
template <bool kPacked, int kVectors>
struct Tile {
  Floats sums[kPanelRows][kVectors];

  // Also prefetches the next row panel, which is in a slower cache.
  inline __attribute__((always_inline)) void multiply(int64_t pairs, const RowPanel& a, const Pair* b) {
    constexpr int64_t kLine = 16;
    const Pair* packed = a.packed;
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[r][j] = Floats{};
    for (int64_t k = 0; k < pairs;) {
#pragma GCC unroll 8
      for (int r = 0; r < kPanelRows; ++r) {
        const void* next = kPacked ? (const void*)(packed + a.next + r * kLine) : a.rows[r] + a.next + 2 * k;
        _mm_prefetch((const char*)next, _MM_HINT_T0);
      }
      const int64_t stop = std::min(k + kLine, pairs);
      for (; k < stop; ++k, b += kPanelColumns, packed += kPanelRows) {
        __m512bh of_b[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) of_b[j] = (__m512bh)_mm512_loadu_si512(b + j * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kPanelRows; ++r) {
          Pair pair;
          std::memcpy(&pair, kPacked ? (const void*)(packed + r) : a.rows[r] + 2 * k, sizeof pair);
          const auto of_a = (__m512bh)_mm512_set1_epi32(int(pair));
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j)
            sums[r][j] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][j], of_a, of_b[j]);
        }
      }
    }
  }

  template <typename T>
  inline __attribute__((always_inline)) void put(const Result<T>& c, const Floats* bias, T* to) {
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        T* at = to + r * c.row + j * kLanes;
        Floats x = sums[r][j];
        if (c.bias) x += bias[j];
        if constexpr (sizeof(T) == 4)
          if (c.add) x += load(at);
        store(at, x);
      }
  }

  // For tiles at the edge of c.
  template <typename T>
  void put_some(const Result<T>& c, const Floats* bias, T* to, int64_t high, int64_t wide) const {
    for (int64_t r = 0; r < high; ++r)
      for (int64_t j = 0; j < kVectors; ++j) {
        T* at = to + r * c.row + j * kLanes;
        const int64_t count = std::min<int64_t>(kLanes, wide - j * kLanes);
        Floats x = sums[r][j];
        if (c.bias) x += bias[j];
        if (c.add) x += load_some(at, count, 0.0f);
        store_some(at, x, count);
      }
  }
};

// Destination of a tile of c, the bias of its columns or null, and its valid rows and columns.
template <typename T>
struct Place {
  T* to;
  const BFloat16* bias;
  int64_t high, wide;
};

template <bool kPacked, int kVectors, typename T>
void tile_product(int64_t pairs, const RowPanel& a, const Pair* b, const Result<T>& c, const Place<T>& place) {
  Tile<kPacked, kVectors> tile;
  tile.multiply(pairs, a, b);
  Floats bias[kVectors] = {};
  if (c.bias)
    for (int j = 0; j < kVectors; ++j)
      bias[j] = load_some(place.bias + j * kLanes, std::min<int64_t>(kLanes, place.wide - j * kLanes), 0.0f);
  if (place.high == kPanelRows && place.wide == kVectors * kLanes) {
    tile.put(c, bias, place.to);
  } else {
    const Tile<kPacked, kVectors> in_memory = tile;
    in_memory.put_some(c, bias, place.to, place.high, place.wide);
  }
}

template <bool kPacked, typename T>
void panel_product(int64_t columns, int64_t pairs, const RowPanel& a, const Pair* b, const Result<T>& c,
                   const Place<T>& first) {
  for (int64_t column = 0; column < columns; column += kPanelColumns, b += kPanelColumns * pairs) {
    const int64_t wide = std::min<int64_t>(kPanelColumns, columns - column);
    const Place<T> place = {first.to + column, c.bias ? first.bias + column : nullptr, first.high, wide};
    if (wide > 2 * kLanes)
      tile_product<kPacked, 3>(pairs, a, b, c, place);
    else if (wide > kLanes)
      tile_product<kPacked, 2>(pairs, a, b, c, place);
    else
      tile_product<kPacked, 1>(pairs, a, b, c, place);
  }
}

}  // namespace

void pack_rows(const Matrix<BFloat16>& from, int64_t first, int64_t last, int64_t begin, int64_t end, Pair* to) {
  const BFloat16* data = from.data + first * from.row + begin * from.inner;
  const int64_t inner = end - begin, rows = last - first;
  if (from.row == 1 && from.inner != 1) return pack_beside_rows({data, 1, from.inner}, rows, inner, to);
  for (int64_t row = 0; row < rows; row += kPanelRows)
    pack_panel<kPanelRows>({data + row * from.row, from.row, from.inner}, std::min<int64_t>(kPanelRows, rows - row),
                           inner, to + row / kPanelRows * row_panel(inner));
}

void pack_columns(const Matrix<BFloat16>& from, int64_t first, int64_t last, int64_t begin, int64_t end, Pair* to) {
  const BFloat16* data = from.data + first * from.row + begin * from.inner;
  const int64_t inner = end - begin, columns = last - first;
  if (from.row == 1 && from.inner != 1) return pack_beside_columns({data, 1, from.inner}, columns, inner, to);
  for (int64_t column = 0; column < columns; column += kPanelColumns)
    pack_panel<kPanelColumns>({data + column * from.row, from.row, from.inner},
                              std::min<int64_t>(kPanelColumns, columns - column), inner, to + column * pairs_of(inner));
}

template <typename T>
void block_product(int64_t rows, int64_t columns, int64_t inner, const Rows& a, const Pair* packed_b,
                   const Result<T>& c) {
  const int64_t pairs = pairs_of(inner);
  const int64_t cached = std::max<int64_t>(1, kCached / (pairs * kPanelColumns)) * kPanelColumns;
  for (int64_t from = 0; from < columns; from += cached)
    for (int64_t row = 0; row < rows; row += kPanelRows) {
      const int64_t high = std::min<int64_t>(kPanelRows, rows - row), wide = std::min(cached, columns - from);
      const Pair* b = packed_b + from * pairs;
      const Place<T> first = {c.data + row * c.row + from, c.bias ? c.bias + from : nullptr, high, 0};
      RowPanel panel = {{}, nullptr, a.packed ? row_panel(inner) : kPanelRows * a.row};
      if (a.packed) {
        panel.packed = a.packed + row / kPanelRows * row_panel(inner);
        panel_product<true>(wide, pairs, panel, b, c, first);
      } else {
        for (int64_t r = 0; r < kPanelRows; ++r) panel.rows[r] = a.data + (row + std::min(r, high - 1)) * a.row;
        panel_product<false>(wide, pairs, panel, b, c, first);
      }
    }
}

template void block_product(int64_t, int64_t, int64_t, const Rows&, const Pair*, const Result<float>&);
template void block_product(int64_t, int64_t, int64_t, const Rows&, const Pair*, const Result<BFloat16>&);

}  // namespace megads::bf16

#endif
