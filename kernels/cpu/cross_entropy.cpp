#include "cross_entropy.h"

#include <algorithm>

namespace megads {
namespace {

constexpr int64_t kBlock = 1024;  // logits of a row that stay in the L1 cache between the two passes over them
constexpr float kLog2E = 1.44269504088896341f;

template <typename T>
Floats load_to(const T* from, int64_t column, int64_t stop, float rest) {
  return column + kLanes <= stop ? load(from + column) : load_some(from + column, stop - column, rest);
}

template <typename T>
float largest_of_block(const T* row, int64_t begin, int64_t stop, float largest) {
  Floats peaks[2] = {broadcast(largest), broadcast(largest)};
  int64_t c = begin;
  for (; c + 2 * kLanes <= stop; c += 2 * kLanes) {
    peaks[0] = larger(load(row + c), peaks[0]);
    peaks[1] = larger(load(row + c + kLanes), peaks[1]);
  }
  for (; c < stop; c += kLanes) peaks[0] = larger(load_to(row, c, stop, -kInfinity), peaks[0]);
  return largest_of(larger(peaks[0], peaks[1]));
}

// Sum of exp(logit - base).
template <typename T>
float sum_of_block(const T* row, int64_t begin, int64_t stop, float base) {
  Floats sums[2] = {};
  int64_t c = begin;
  for (; c + 2 * kLanes <= stop; c += 2 * kLanes) {
    sums[0] += exp2((load(row + c) - base) * kLog2E);
    sums[1] += exp2((load(row + c + kLanes) - base) * kLog2E);
  }
  for (; c < stop; c += kLanes) sums[0] += exp2((load_to(row, c, stop, -kInfinity) - base) * kLog2E);
  return sum_of(sums[0] + sums[1]);
}

float exp_of(float x) { return exp2(broadcast(x * kLog2E))[0]; }

template <typename T>
void statistics_of(const T* row, int64_t label, int64_t valid, float* statistics) {
  float largest = -kInfinity;
  double total = 0.0;
  for (int64_t begin = 0; begin < valid; begin += kBlock) {
    const int64_t stop = std::min(begin + kBlock, valid);
    const float now = largest_of_block(row, begin, stop, largest);
    // If all logits so far are -inf, they add 0; a NaN must propagate.
    const float base = now == -kInfinity ? 0.0f : now;
    if (now != largest) total *= exp_of(largest - now);
    total += sum_of_block(row, begin, stop, base);
    largest = now;
  }
  statistics[0] = largest;
  statistics[1] = float(total);
  statistics[2] = label >= 0 && label < valid ? widen(row[label]) : 0.0f;
}

// ahead: the next row, to prefetch, or the row itself.
template <typename T>
void gradient_of(T* row, const T* ahead, int64_t label, int64_t columns, int64_t valid, float largest, float total,
                 float grad) {
  const bool own = label >= 0 && label < valid;
  const float of_label = own ? exp_of(widen(row[label]) - largest) / total : 0.0f;
  const float factor = grad / total;
  int64_t c = 0;
  for (; c + kLanes <= valid; c += kLanes) {
    __builtin_prefetch(ahead + c);
    store(row + c, exp2<T>((load(row + c) - largest) * kLog2E) * factor);
  }
  if (c < valid) {
    const Floats rest = load_some(row + c, valid - c, 0.0f);
    store_some(row + c, exp2<T>((rest - largest) * kLog2E) * factor, valid - c);
  }
  for (c = valid; c < columns; ++c) narrow(row + c, 0.0f);
  if (own) narrow(row + label, (of_label - 1.0f) * grad);
}

}  // namespace

template <typename T>
void cross_entropy_forward(const LogitRows<T>& rows, float* statistics, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r)
    statistics_of(rows.logits + r * rows.columns, rows.labels[r] - rows.start, rows.valid, statistics + 3 * r);
}

template <typename T>
void cross_entropy_gradient(const LogitRows<T>& rows, const float* largest, const float* total, const float* grad,
                            int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    T* row = rows.logits + r * rows.columns;
    gradient_of(row, row, rows.labels[r] - rows.start, rows.columns, rows.valid, largest[r], total[r], grad[r]);
  }
}

template <typename T>
void cross_entropy_loss(const LogitRows<T>& rows, const float* grad, float* statistics, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    T* row = rows.logits + r * rows.columns;
    const int64_t label = rows.labels[r] - rows.start;
    float* of_row = statistics + 3 * r;
    statistics_of(row, label, rows.valid, of_row);
    gradient_of(row, r + 1 < last ? row + rows.columns : row, label, rows.columns, rows.valid, of_row[0], of_row[1],
                grad[r]);
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
