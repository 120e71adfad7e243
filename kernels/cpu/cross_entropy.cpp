#include "cross_entropy.h"

#include <algorithm>
#include <vector>

#include "lanes.h"

namespace megads {
namespace {

constexpr int64_t kBlock = 1024;  // logits of a row that stay in the L1 cache between the two passes over them

// Whether exponentials are kept in fp32 from the statistics to the gradient. With AVX-512 computing them again is as
// fast.
constexpr bool kKeeps = kLanes < 16;

// exp(logit - base) of a row of `valid` logits, in the order of load_two, and the base of every block.
struct Exponentials {
  std::vector<float> values, bases;

  explicit Exponentials(int64_t valid) : values(valid + 2 * kLanes), bases(valid / kBlock + 1) {}
};

// Loads the first `count` logits; the others are -inf.
template <typename T>
inline TwoVectors load_logits(const T* from, int count) {
  if (count == 2 * kLanes) return load_two(from);
  T some[2 * kLanes];
  for (T& logit : some) narrow(&logit, -kInfinity);
  for (int i = 0; i < count; ++i) some[i] = from[i];
  return load_two(some);
}

template <typename T>
float largest_of_block(const T* row, int64_t begin, int64_t stop, float largest) {
  TwoVectors peaks = {broadcast(largest), broadcast(largest)};
  for_two_vectors(begin, stop, [&](int64_t c, int count) {
    const TwoVectors x = load_logits(row + c, count);
    peaks = {larger(x.first, peaks.first), larger(x.second, peaks.second)};
  });
  return largest_of(larger(peaks.first, peaks.second));
}

// Sum of exp(logit - base); `kept` receives the terms if it is not null.
template <typename T>
float sum_of_block(const T* row, int64_t begin, int64_t stop, float base, float* kept) {
  Floats sums[2] = {};
  for_two_vectors(begin, stop, [&](int64_t c, int count) {
    const TwoVectors x = load_logits(row + c, count);
    const Floats first = exp2((x.first - base) * kLog2E), second = exp2((x.second - base) * kLog2E);
    if (kept) {
      store(kept + c, first);
      store(kept + c + kLanes, second);
    }
    sums[0] += first;
    sums[count == 2 * kLanes] += second;
  });
  return sum_of(sums[0] + sums[1]);
}

float exp_of(float x) { return exp2(broadcast(x * kLog2E))[0]; }

template <typename T>
void statistics_of(const T* row, int64_t label, int64_t valid, float* statistics, Exponentials* kept) {
  float largest = -kInfinity;
  double total = 0.0;
  for (int64_t begin = 0; begin < valid; begin += kBlock) {
    const int64_t stop = std::min(begin + kBlock, valid);
    const float now = largest_of_block(row, begin, stop, largest);
    // If all logits so far are -inf, they add 0; a NaN must propagate.
    const float base = now == -kInfinity ? 0.0f : now;
    if (now != largest) total *= exp_of(largest - now);
    total += sum_of_block(row, begin, stop, base, kept ? kept->values.data() : nullptr);
    if (kept) kept->bases[begin / kBlock] = base;
    largest = now;
  }
  statistics[0] = largest;
  statistics[1] = float(total);
  statistics[2] = label >= 0 && label < valid ? widen(row[label]) : 0.0f;
}

// ahead: the next row, to prefetch, or the row itself. kept: exponentials of the row, or null.
template <typename T>
void gradient_of(T* row, const T* ahead, int64_t label, int64_t columns, int64_t valid, float largest, float total,
                 float grad, const Exponentials* kept) {
  const bool own = label >= 0 && label < valid;
  const float of_label = own ? exp_of(widen(row[label]) - largest) / total : 0.0f;
  const float factor = grad / total;
  if (kept) {
    for (int64_t begin = 0; begin < valid; begin += kBlock) {
      const float scale = exp_of(kept->bases[begin / kBlock] - largest) * factor;
      for_two_vectors(begin, std::min(begin + kBlock, valid), [&](int64_t c, int count) {
        __builtin_prefetch(ahead + c);
        const float* terms = kept->values.data() + c;
        store_two_lanes(row + c, {load(terms) * scale, load(terms + kLanes) * scale}, count);
      });
    }
  } else {
    for_two_vectors(0, valid, [&](int64_t c, int count) {
      __builtin_prefetch(ahead + c);
      if constexpr (2 * kLanes * sizeof(T) > 64) __builtin_prefetch(ahead + c + kLanes);
      const TwoVectors x = load_two_lanes(row + c, count);
      const Floats first = exp2<T>((x.first - largest) * kLog2E), second = exp2<T>((x.second - largest) * kLog2E);
      store_two_lanes(row + c, {first * factor, second * factor}, count);
    });
  }
  for (int64_t c = valid; c < columns; ++c) narrow(row + c, 0.0f);
  if (own) narrow(row + label, (of_label - 1.0f) * grad);
}

}  // namespace

template <typename T>
void cross_entropy_forward(const LogitRows<T>& rows, float* statistics, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const int64_t label = rows.labels[r] - rows.start;
    statistics_of(rows.logits + r * rows.columns, label, rows.valid, statistics + 3 * r, nullptr);
  }
}

template <typename T>
void cross_entropy_gradient(const LogitRows<T>& rows, const float* largest, const float* total, const float* grad,
                            int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    T* row = rows.logits + r * rows.columns;
    const int64_t label = rows.labels[r] - rows.start;
    gradient_of(row, row, label, rows.columns, rows.valid, largest[r], total[r], grad[r], nullptr);
  }
}

template <typename T>
void cross_entropy_loss(const LogitRows<T>& rows, const float* grad, float* statistics, int64_t first, int64_t last) {
  Exponentials room(kKeeps ? rows.valid : 0);
  Exponentials* const kept = kKeeps ? &room : nullptr;
  for (int64_t r = first; r < last; ++r) {
    T* row = rows.logits + r * rows.columns;
    const int64_t label = rows.labels[r] - rows.start;
    float* of_row = statistics + 3 * r;
    statistics_of(row, label, rows.valid, of_row, kept);
    gradient_of(row, r + 1 < last ? row + rows.columns : row, label, rows.columns, rows.valid, of_row[0], of_row[1],
                grad[r], kept);
  }
}

#define MEGADS_INSTANTIATE(T)                                                                                       \
  template void cross_entropy_forward<T>(const LogitRows<T>&, float*, int64_t, int64_t);                            \
  template void cross_entropy_gradient<T>(const LogitRows<T>&, const float*, const float*, const float*, int64_t,   \
                                          int64_t);                                                                 \
  template void cross_entropy_loss<T>(const LogitRows<T>&, const float*, float*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
