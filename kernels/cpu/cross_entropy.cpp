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

// exp(logit - base) of a row of `valid` logits, in the order of load_two, and the base of every block. fp32 logits are
// overwritten with them.
template <typename T>
class Exponentials {
 public:
  explicit Exponentials(int64_t valid) : room_(kInPlace ? 0 : valid + 2 * kLanes), bases(valid / kBlock + 1) {}

  void keep(T* row, int64_t c, TwoVectors x, int count) {
    if constexpr (kInPlace) {
      store_two_lanes(row + c, x, count);
    } else {
      store(room_.data() + c, x.first);
      store(room_.data() + c + kLanes, x.second);
    }
  }

  TwoVectors at(const T* row, int64_t c, int count) const {
    if constexpr (kInPlace) return load_two_lanes(row + c, count);
    return {load(room_.data() + c), load(room_.data() + c + kLanes)};
  }

 private:
  static constexpr bool kInPlace = sizeof(T) == 4;

  std::vector<float> room_;

 public:
  std::vector<float> bases;
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

// Sum of exp(logit - base). If `kept` is not null, it receives the terms, and the next row is prefetched: the pass for
// the gradient is too short for it.
template <typename T>
float sum_of_block(T* row, const T* ahead, int64_t begin, int64_t stop, float base, Exponentials<T>* kept) {
  Floats sums[2] = {};
  for_two_vectors(begin, stop, [&](int64_t c, int count) {
    const TwoVectors x = load_logits(row + c, count);
    const Floats first = exp2((x.first - base) * kLog2E), second = exp2((x.second - base) * kLog2E);
    if (kept) {
      __builtin_prefetch(ahead + c, 0, 2);
      kept->keep(row, c, {first, second}, count);
    }
    sums[0] += first;
    sums[count == 2 * kLanes] += second;
  });
  return sum_of(sums[0] + sums[1]);
}

float exp_of(float x) { return exp2(broadcast(x * kLog2E))[0]; }

// ahead: the next row, or the row itself. kept: room for the exponentials, or null.
template <typename T>
void statistics_of(T* row, const T* ahead, int64_t label, int64_t valid, float* statistics, Exponentials<T>* kept) {
  const float of_label = label >= 0 && label < valid ? widen(row[label]) : 0.0f;
  float largest = -kInfinity;
  double total = 0.0;
  for (int64_t begin = 0; begin < valid; begin += kBlock) {
    const int64_t stop = std::min(begin + kBlock, valid);
    const float now = largest_of_block(row, begin, stop, largest);
    // If all logits so far are -inf, they add 0; a NaN must propagate.
    const float base = now == -kInfinity ? 0.0f : now;
    if (now != largest) total *= exp_of(largest - now);
    total += sum_of_block(row, ahead, begin, stop, base, kept);
    if (kept) kept->bases[begin / kBlock] = base;
    largest = now;
  }
  statistics[0] = largest;
  statistics[1] = float(total);
  statistics[2] = of_label;
}

// ahead: the next row, to prefetch, or the row itself. kept: exponentials of the row, or null. logit: of the label.
template <typename T>
void gradient_of(T* row, const T* ahead, int64_t label, int64_t columns, int64_t valid, float largest, float total,
                 float logit, float grad, const Exponentials<T>* kept) {
  const bool own = label >= 0 && label < valid;
  const float of_label = own ? exp_of(logit - largest) / total : 0.0f;
  const float factor = grad / total;
  if (kept) {
    for (int64_t begin = 0; begin < valid; begin += kBlock) {
      const float scale = exp_of(kept->bases[begin / kBlock] - largest) * factor;
      for_two_vectors(begin, std::min(begin + kBlock, valid), [&](int64_t c, int count) {
        const TwoVectors terms = kept->at(row, c, count);
        store_two_lanes(row + c, {terms.first * scale, terms.second * scale}, count);
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
    T* row = rows.logits + r * rows.columns;
    statistics_of<T>(row, row, rows.labels[r] - rows.start, rows.valid, statistics + 3 * r, nullptr);
  }
}

template <typename T>
void cross_entropy_gradient(const LogitRows<T>& rows, const float* largest, const float* total, const float* grad,
                            int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    T* row = rows.logits + r * rows.columns;
    const int64_t label = rows.labels[r] - rows.start;
    const float logit = label >= 0 && label < rows.valid ? widen(row[label]) : 0.0f;
    gradient_of<T>(row, row, label, rows.columns, rows.valid, largest[r], total[r], logit, grad[r], nullptr);
  }
}

template <typename T>
void cross_entropy_loss(const LogitRows<T>& rows, const float* grad, float* statistics, int64_t first, int64_t last) {
  Exponentials<T> room(kKeeps ? rows.valid : 0);
  Exponentials<T>* const kept = kKeeps ? &room : nullptr;
  for (int64_t r = first; r < last; ++r) {
    T* row = rows.logits + r * rows.columns;
    const int64_t label = rows.labels[r] - rows.start;
    float* of_row = statistics + 3 * r;
    const T* ahead = r + 1 < last ? row + rows.columns : row;
    statistics_of(row, ahead, label, rows.valid, of_row, kept);
    gradient_of(row, ahead, label, rows.columns, rows.valid, of_row[0], of_row[1], of_row[2], grad[r], kept);
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
