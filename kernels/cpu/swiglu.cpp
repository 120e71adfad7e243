#include "swiglu.h"

#include <algorithm>

#include "lanes.h"

namespace megads {
namespace {

struct Pairs {
  Floats gate, up;
};

// Lane i of the result is lane numbers[i] of x and y concatenated.
inline Floats pick(Floats x, Floats y, Ints numbers) {
#if defined(__clang__)
  Floats picked;
  for (int lane = 0; lane < kLanes; ++lane)
    picked[lane] = numbers[lane] < kLanes ? x[numbers[lane]] : y[numbers[lane] - kLanes];
  return picked;
#else
  return __builtin_shuffle(x, y, numbers);
#endif
}

// AVX2's shuffles of two vectors stay within 128 bits. So the lanes of Pairs are in the order 0 1 4 5 2 3 6 7 there, and
// other vectors are put in this order, or back, which is the same.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline Floats reorder(Floats x) { return (Floats)_mm256_permute4x64_pd((__m256d)x, 0xd8); }

inline Pairs separate(Floats x, Floats y) {
  return {(Floats)_mm256_shuffle_ps((__m256)x, (__m256)y, 0x88), (Floats)_mm256_shuffle_ps((__m256)x, (__m256)y, 0xdd)};
}

inline TwoVectors interleave(Pairs x) {
  return {(Floats)_mm256_unpacklo_ps((__m256)x.gate, (__m256)x.up),
          (Floats)_mm256_unpackhi_ps((__m256)x.gate, (__m256)x.up)};
}
#else
inline Floats reorder(Floats x) { return x; }

inline Pairs separate(Floats x, Floats y) {
  return {pick(x, y, 2 * lane_numbers()), pick(x, y, 2 * lane_numbers() + 1)};
}

inline TwoVectors interleave(Pairs x) {
  const Ints lanes = lane_numbers(), sides = (lanes & 1) * kLanes;
  return {pick(x.gate, x.up, lanes / 2 + sides), pick(x.gate, x.up, lanes / 2 + kLanes / 2 + sides)};
}
#endif

// One element of each of `count` pairs, in the order of Pairs. bf16 pairs are the halves of words and need none.
inline __attribute__((always_inline)) Floats load_beside(const float* from, int count) {
  return reorder(load_lanes(from, count));
}

inline __attribute__((always_inline)) Floats load_beside(const BFloat16* from, int count) {
  return load_lanes(from, count);
}

inline __attribute__((always_inline)) void store_beside(float* to, Floats x, int count) {
  store_lanes(to, reorder(x), count);
}

inline __attribute__((always_inline)) void store_beside(BFloat16* to, Floats x, int count) {
  store_lanes(to, x, count);
}

inline __attribute__((always_inline)) Pairs load_pairs(const float* from, int count) {
  const int first = count * 2 < kLanes ? count * 2 : kLanes;
  return separate(load_lanes(from, first), load_lanes(from + first, 2 * count - first));
}

inline __attribute__((always_inline)) Pairs load_pairs(const BFloat16* from, int count) {
  BFloat16 some[2 * kLanes] = {};
  if (count < kLanes) from = std::copy(from, from + 2 * count, some) - 2 * count;
  const TwoVectors x = load_even_odd(from);
  return {x.first, x.second};
}

inline __attribute__((always_inline)) void store_pairs(float* to, Pairs pairs, int count) {
  const int first = count * 2 < kLanes ? count * 2 : kLanes;
  const TwoVectors x = interleave(pairs);
  store_lanes(to, x.first, first);
  store_lanes(to + first, x.second, 2 * count - first);
}

inline __attribute__((always_inline)) void store_pairs(BFloat16* to, Pairs pairs, int count) {
  if (count == kLanes) {
    store_even_odd(to, {pairs.gate, pairs.up});
  } else {
    BFloat16 some[2 * kLanes];
    store_even_odd(some, {pairs.gate, pairs.up});
    std::copy(some, some + 2 * count, to);
  }
}

// x is clamped so that exp(-x) stays finite, which it must with AVX-512.
template <typename RoundedTo>
inline Floats sigmoid(Floats x) {
#if defined(__AVX512F__)
  x = larger(broadcast(-87.0f), x);
#endif
  return 1.0f / (1.0f + exp_for<RoundedTo>(-x));
}

}  // namespace

template <typename T>
void swiglu_forward(const T* pairs, T* out, int64_t first, int64_t last) {
  for_vectors(first, last, [&](int64_t i, int count) {
    const Pairs x = load_pairs(pairs + 2 * i, count);
    store_beside(out + i, x.gate * sigmoid<T>(x.gate) * x.up, count);
  });
}

template <typename T>
void swiglu_backward(const T* grad, const T* pairs, T* grad_pairs, int64_t first, int64_t last) {
  for_vectors(first, last, [&](int64_t i, int count) {
    const Pairs x = load_pairs(pairs + 2 * i, count);
    const Floats g = load_beside(grad + i, count), s = sigmoid<T>(x.gate);
    const Floats silu = x.gate * s;
    store_pairs(grad_pairs + 2 * i, {g * x.up * (s + silu * (1.0f - s)), g * silu}, count);
  });
}

#define MEGADS_INSTANTIATE(T)                                                     \
  template void swiglu_forward<T>(const T*, T*, int64_t, int64_t);                \
  template void swiglu_backward<T>(const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
