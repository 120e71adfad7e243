// Blocks of queries and of keys: visible keys of a query, and packing of operands for the GEMMs.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "attention.h"
#include "matrix_product.h"

namespace megads {

// Blocks are split into tiles: of queries if output rows are queries, of keys if they are keys.
constexpr int64_t kQueryBlock = 96, kKeyBlock = 128;
constexpr int kQueryRows = 6, kKeyRows = 4;
static_assert(kQueryBlock % kQueryRows == 0 && kKeyBlock % kKeyRows == 0 && kKeyBlock % kLanes == 0);

constexpr int64_t blocks_of(int64_t rows, int64_t block) { return (rows + block - 1) / block; }

constexpr int64_t rounded_up(int64_t count, int64_t multiple) { return blocks_of(count, multiple) * multiple; }

// Load balancing: work grows or shrinks from block to block, so the first is paired with the last, and neighbouring
// pairs in this order have equal work.
constexpr int64_t balanced(int64_t index, int64_t count) { return index % 2 ? count - 1 - index / 2 : index / 2; }

// Keys visible to a query: first..last, inclusive.
struct Visible {
  int64_t first, last;

  bool none() const { return first > last; }

  void add(Visible other) {
    if (!other.none()) *this = {std::min(first, other.first), std::max(last, other.last)};
  }
};

inline Visible visible_keys(const Attention& shape, int64_t b, int64_t query) {
  if (query >= shape.queries) return {shape.keys, -1};
  const int64_t place = shape.place(query);
  const int64_t start = shape.starts ? shape.starts[b * shape.queries + query] : 0;
  return {std::max<int64_t>(start, 0), std::min(place, shape.keys - 1)};
}

// Range from the first to the last key visible to any of the queries.
inline Visible visible_to(const Attention& shape, int64_t b, int64_t query, int64_t count) {
  Visible all{shape.keys, -1};
  for (int64_t r = 0; r < count; ++r) all.add(visible_keys(shape, b, query + r));
  return all;
}

// Columns first..last-1 of a block of keys, in whole vectors, that are visible to any query of a tile.
struct Columns {
  int64_t first, last;

  Columns(const Visible& keys, int64_t key)
      : first(std::max<int64_t>(keys.first - key, 0) / kLanes * kLanes),
        last(rounded_up(std::clamp<int64_t>(keys.last - key + 1, 0, kKeyBlock), kLanes)) {
    if (first >= last) first = last = 0;
  }

  bool none() const { return first == last; }
};

// Mask and ALiBi bias of one query for a block of keys.
class ScoreRow {
 public:
  ScoreRow(const Attention& shape, int64_t b, int64_t h, int64_t query, int64_t key) {
    const Visible keys = visible_keys(shape, b, query);
    const bool inside = query < shape.queries;
    const int64_t place = inside ? shape.place(query) : query;
    scale_ = shape.scale * kLog2E;
    slope_ = shape.slopes ? shape.slopes[h] * kLog2E : 0.0f;
    distance_ = float(key - place);
    first_ = int32_t(std::clamp<int64_t>(keys.first - key, 0, kKeyBlock));
    last_ = int32_t(std::clamp<int64_t>(keys.last - key, -1, kKeyBlock - 1));
    if (!inside) distance_ = 0.0f;
  }

  // Whether all of these columns are visible.
  bool sees(int64_t first, int64_t last) const { return first_ <= first && last - 1 <= last_; }

  // Lane mask: all ones in visible lanes.
  Ints seen(int64_t column) const {
    const Ints columns = lane_numbers() + int32_t(column);
    return (columns >= first_) & (columns <= last_);
  }

  // Biased scores times log2(e), from q k^T: exp2 is cheaper than exp.
  Floats biased(Floats products, int64_t column) const {
    const Floats distance = __builtin_convertvector(lane_numbers() + int32_t(column), Floats) + distance_;
    return products * scale_ + slope_ * distance;
  }

 private:
  float scale_, slope_;
  float distance_;        // from the query to the block's first key, exact in fp32 up to 2^24
  int32_t first_, last_;  // visible columns, inclusive
};

// Dropout masks of a tile of queries and a block of keys; without dropout nothing is generated or multiplied.
template <bool kDropped>
class TileMasks {
 public:
  explicit TileMasks(const Attention& shape) : shape_(shape), rows_(shape.dropout) {}

  float scale() const { return rows_.scale(); }

  // Generates a query's mask for columns of a block. Padding queries past the last one reuse its position.
  void draw(int r, int64_t b, int64_t h, int64_t query, int64_t key, const Columns& columns) {
    const int64_t place = shape_.place(std::min(query, shape_.queries - 1));
    drawn_[r] = rows_.draw(b, h, place, key + columns.first, key + columns.last, room_[r]);
    first_ = columns.first;
  }

  // x where the probability is kept, 0 where it is dropped.
  Floats of(int r, int64_t column, Floats x) const { return rows_.stays(drawn_[r] + (column - first_)) ? x : Floats{}; }

 private:
  const Attention& shape_;
  MaskRows rows_;
  int64_t first_ = 0;
  const uint16_t* drawn_[kQueryRows];
  uint16_t room_[kQueryRows][kKeyBlock + MaskRows::kMore];
};

template <>
class TileMasks<false> {
 public:
  explicit TileMasks(const Attention&) {}

  static constexpr float scale() { return 1.0f; }
  void draw(int, int64_t, int64_t, int64_t, int64_t, const Columns&) const {}
  Floats of(int, int64_t, Floats x) const { return x; }
};

// Scratch memory of one thread; allocations are aligned to cache lines.
class Scratch {
 public:
  template <typename U>
  U* take(int64_t elements) {
    void* piece = ::operator new(size_t(elements) * sizeof(U) + kMore, kLine);
    pieces_.emplace_back(piece);
    return static_cast<U*>(piece);
  }

 private:
  static constexpr std::align_val_t kLine{64};
  static constexpr size_t kMore = 64;  // vector accesses may run past the end

  struct Delete {
    void operator()(void* piece) const { ::operator delete(piece, kLine); }
  };

  std::vector<std::unique_ptr<void, Delete>> pieces_;
};

// Sizes of a packed row of `dim` elements: units without padding, units with padding, and elements with padding.
template <typename T>
struct Width {
  static constexpr int kValues = Operand<T>::kValues;

  explicit Width(int64_t dim)
      : units(blocks_of(dim, kValues)), row(rounded_up(units, kLanes)), numbers(rounded_up(dim, kLanes)) {}

  int64_t units, row, numbers;
};

// Vector of a row starting at column d; zeros past the end.
template <typename T>
inline Floats load_within(const T* row, int64_t d, int64_t dim) {
  if (d + kLanes <= dim) return load(row + d);
  return d < dim ? load_some(row + d, dim - d, 0.0f) : Floats{};
}

// Packs one vector of units. Each unit holds one column of kValues rows; zeros from column `count` on.
template <typename T, typename Unit>
inline void interleave(Unit* to, const T* from, int64_t stride, int64_t count) {
#if defined(__AVX512BF16__)
  if constexpr (Operand<T>::kValues == 2) {
    if (count >= kLanes) {
      store(to, load_halves(from) | load_halves(from + stride) << 16);
      return;
    }
  }
#endif
  Floats together[Operand<T>::kValues];
  for (int v = 0; v < Operand<T>::kValues; ++v) together[v] = load_within(from + v * stride, 0, count);
  store_interleaved(to, together);
}

// Packs rows as the left GEMM operand, units along dim: [padded_rows, width.row]; rows from `rows` on are zero.
template <typename T, typename Unit>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t padded_rows, int64_t dim, Unit* to) {
  constexpr int kValues = Operand<T>::kValues;
  const int64_t row = Width<T>(dim).row;
  std::fill(to + rows * row, to + padded_rows * row, Unit{});
  for (int64_t r = 0; r < rows; ++r, from += stride, to += row) {
    if constexpr (sizeof(Unit) == kValues * sizeof(T)) {
      std::memcpy(to, from, size_t(dim) * sizeof(T));
      std::memset(reinterpret_cast<char*>(to) + size_t(dim) * sizeof(T), 0, size_t(row * kValues - dim) * sizeof(T));
    } else {
      for (int64_t d = 0; d < row; d += kLanes) store_beside(to + d, load_within(from, d, dim));
    }
  }
}

// Packs rows as the right GEMM operand, units along rows: [padded_rows / kValues, width.numbers].
template <typename T, typename Unit>
void pack_interleaved(const T* from, int64_t stride, int64_t rows, int64_t padded_rows, int64_t dim, Unit* to) {
  constexpr int kValues = Operand<T>::kValues;
  const int64_t numbers = Width<T>(dim).numbers;
  for (int64_t r = 0; r < padded_rows; r += kValues, to += numbers, from += kValues * stride) {
    if (r + kValues <= rows) {
      for (int64_t d = 0; d < dim; d += kLanes) interleave(to + d, from + d, stride, dim - d);
    } else {
      std::fill(to, to + numbers, Unit{});
      if (r < rows)  // the last row of an odd number
        for (int64_t d = 0; d < dim; d += kLanes) {
          const Floats together[] = {load_within(from, d, dim), Floats{}};
          store_interleaved(to + d, together);
        }
    }
  }
}

// One step of a transposition: swaps the lanes of `low` whose index has bit kStep set with those of `high` whose index
// has not.
template <int kStep, typename Vector, int... kLane>
inline void exchange(Vector& low, Vector& high, std::integer_sequence<int, kLane...>) {
  const Vector before = low;
#if __has_builtin(__builtin_shufflevector)
  low = __builtin_shufflevector(before, high, (kLane & kStep ? kLane - kStep + kLanes : kLane)...);
  high = __builtin_shufflevector(before, high, (kLane & kStep ? kLane + kLanes : kLane + kStep)...);
#else
  low = __builtin_shuffle(before, high, Ints{(kLane & kStep ? kLane - kStep + kLanes : kLane)...});
  high = __builtin_shuffle(before, high, Ints{(kLane & kStep ? kLane + kLanes : kLane + kStep)...});
#endif
}

template <int kStep, typename Vector>
inline void transpose_square(Vector* square) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r)
      if (!(r & kStep)) exchange<kStep>(square[r], square[r + kStep], std::make_integer_sequence<int, kLanes>());
    transpose_square<kStep / 2>(square);
  }
}

// Transposes packed rows of a block of keys, [kKeyBlock, width.row], to the right GEMM operand, units along dim:
// [width.row, kKeyBlock].
template <typename Unit>
void transpose(const Unit* from, int64_t row, Unit* to) {
  for (int64_t unit = 0; unit < row; unit += kLanes)
    for (int64_t r = 0; r < kKeyBlock; r += kLanes) {
      decltype(load(from)) square[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) square[lane] = load(from + (r + lane) * row + unit);
      transpose_square<kLanes / 2>(square);
      for (int lane = 0; lane < kLanes; ++lane) store(to + (unit + lane) * kKeyBlock + r, square[lane]);
    }
}

template <typename T>
void unpack(const float* from, int64_t from_row, int64_t rows, int64_t dim, float factor, T* to, int64_t row) {
  for (int64_t r = 0; r < rows; ++r, from += from_row, to += row) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d) * factor);
    if (d < dim) store_some(to + d, load(from + d) * factor, dim - d);
  }
}

}  // namespace megads
