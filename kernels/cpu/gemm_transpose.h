// Packs matrix rows into the panels that the GEMMs read: the words of all rows at one inner position are adjacent.
#pragma once

#include <type_traits>

#include "vector.h"

namespace megads {

// Strided view of a matrix: element (i, k) is at data[i * row + k * inner].
template <typename T>
struct Matrix {
  const T* data;
  int64_t row, inner;
};

constexpr int kBlock = 8;
typedef float Eight __attribute__((vector_size(kBlock * 4)));
typedef int32_t EightInts __attribute__((vector_size(kBlock * 4)));
typedef uint16_t EightHalves __attribute__((vector_size(kBlock * 2)));

constexpr int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

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

// Transposes an 8x8 block. Each round rotates the bits of an element's index (row, column) by one; three rounds swap
// row and column.
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

// Elements of type T per panel word: one if the word is fp32 (bf16 is converted to it), else as many as fit.
template <typename T, typename Word>
constexpr int64_t kValuesOf = std::is_same_v<Word, float> ? 1 : sizeof(Word) / sizeof(T);

template <typename T, typename Word>
inline Eight eight_words(const T* from) {
  Eight x;
  if constexpr (sizeof(T) * kValuesOf<T, Word> == sizeof(Word)) {
    std::memcpy(&x, from, sizeof x);
  } else {
    EightHalves bits;
    std::memcpy(&bits, from, sizeof bits);
    x = (Eight)(__builtin_convertvector(bits, EightInts) << 16);
  }
  return x;
}

template <typename T, typename Word>
inline Word one_word(const T* from) {
  Word word{};
  if constexpr (sizeof(T) * kValuesOf<T, Word> == sizeof(Word)) {
    std::memcpy(&word, from, sizeof word);
  } else {
    word = widen(*from);
  }
  return word;
}

// Packs one panel of contiguous rows: `words` 32-bit words per row, each one fp32 or two bf16 elements; missing rows
// are zero. If the panel width is not a multiple of eight, stores run past the end of a word position; the next
// position, which is written later, overwrites them.
template <int kWidth, typename T, typename Word>
void pack_transposed(const T* data, int64_t row, int64_t rows, int64_t words, Word* to) {
  static_assert(sizeof(Word) == 4);
  constexpr int64_t kValues = kValuesOf<T, Word>;
  int64_t k = 0;
  for (; k + kBlock <= words; k += kBlock)
    for (int group = 0; group < kWidth; group += kBlock) {
      Eight x[kBlock];
#pragma GCC unroll 8
      for (int r = 0; r < kBlock; ++r)
        if (group + r < kWidth && group + r < rows)
          x[r] = eight_words<T, Word>(data + (group + r) * row + k * kValues);
        else
          x[r] = Eight{};
      transpose(x);
#pragma GCC unroll 8
      for (int j = 0; j < kBlock; ++j) std::memcpy(to + (k + j) * kWidth + group, &x[j], sizeof x[j]);
    }
  for (; k < words; ++k)
    for (int r = 0; r < kWidth; ++r)
      to[k * kWidth + r] = r < rows ? one_word<T, Word>(data + r * row + k * kValues) : Word{};
}

}  // namespace megads
