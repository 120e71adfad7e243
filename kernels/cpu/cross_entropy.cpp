#include "cross_entropy.h"

#include <algorithm>

namespace megads {
namespace {

constexpr int64_t kBlock = 1024;  // logits of a row that stay in the first cache between the two looks at them

template <typename T>
Floats load_to(const T* from, int64_t column, int64_t stop, float rest) {
  return column + kLanes <= stop ? load(from + column) : load_some(from + column, stop - column, rest);
}

}  // namespace

template <typename T>
void cross_entropy_forward(const T* logits, const int64_t* labels, int64_t columns, int64_t valid, int64_t start,
                           float* statistics, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const T* row = logits + r * columns;
    float largest = -kInfinity;
    double total = 0.0;
    for (int64_t begin = 0; begin < valid; begin += kBlock) {
      const int64_t stop = std::min(begin + kBlock, valid);
      Floats peaks[2] = {broadcast(largest), broadcast(largest)};
      int64_t c = begin;
      for (; c + 2 * kLanes <= stop; c += 2 * kLanes) {
        peaks[0] = larger(load(row + c), peaks[0]);
        peaks[1] = larger(load(row + c + kLanes), peaks[1]);
      }
      for (; c < stop; c += kLanes) peaks[0] = larger(load_to(row, c, stop, -kInfinity), peaks[0]);
      const float now = largest_of(larger(peaks[0], peaks[1]));
      // Nothing but -inf so far adds nothing; a NaN among it must come through.
      const float base = now == -kInfinity ? 0.0f : now;
      Floats sums[2] = {};
      for (c = begin; c + 2 * kLanes <= stop; c += 2 * kLanes) {
        sums[0] += exp(load(row + c) - base);
        sums[1] += exp(load(row + c + kLanes) - base);
      }
      for (; c < stop; c += kLanes) sums[0] += exp(load_to(row, c, stop, -kInfinity) - base);
      if (now != largest) total *= exp(broadcast(largest - now))[0];
      total += sum_of(sums[0] + sums[1]);
      largest = now;
    }
    const int64_t label = labels[r] - start;
    statistics[3 * r] = largest;
    statistics[3 * r + 1] = float(total);
    statistics[3 * r + 2] = label >= 0 && label < valid ? widen(row[label]) : 0.0f;
  }
}

template <typename T>
void cross_entropy_backward(const T* logits, const int64_t* labels, const float* largest, const float* total,
                            const float* grad, int64_t columns, int64_t valid, int64_t start, T* grad_logits,
                            int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const T* row = logits + r * columns;
    T* to = grad_logits + r * columns;
    const float factor = grad[r] / total[r];
    int64_t c = 0;
    for (; c + kLanes <= valid; c += kLanes) store(to + c, exp(load(row + c) - largest[r]) * factor);
    if (c < valid) store_some(to + c, exp(load_some(row + c, valid - c, 0.0f) - largest[r]) * factor, valid - c);
    for (c = valid; c < columns; ++c) narrow(to + c, 0.0f);
    const int64_t label = labels[r] - start;
    if (label < 0 || label >= valid) continue;
    const float probability = exp(broadcast(widen(row[label]) - largest[r]))[0] / total[r];
    narrow(to + label, (probability - 1.0f) * grad[r]);
  }
}

#define MEGADS_INSTANTIATE(T)                                                                                         \
  template void cross_entropy_forward<T>(const T*, const int64_t*, int64_t, int64_t, int64_t, float*, int64_t,        \
                                         int64_t);                                                                    \
  template void cross_entropy_backward<T>(const T*, const int64_t*, const float*, const float*, const float*,         \
                                          int64_t, int64_t, int64_t, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
