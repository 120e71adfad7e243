#include "norm.h"

#include <cmath>
#include <type_traits>

#include "row_blocks.h"

namespace megads {
namespace {

// Sum of x, in four independent accumulators.
template <typename T>
float sum_of_row(const T* x, int64_t width) {
  Floats sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
    for (int i = 0; i < 4; ++i) {
      __builtin_prefetch(x + width + c + i * kLanes);  // the next row
      sums[i] += load(x + c + i * kLanes);
    }
  for (; c + kLanes <= width; c += kLanes) sums[0] += load(x + c);
  if (c < width) sums[1] += load_some(x + c, width - c, 0.0f);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Sum of (x - mean)^2, likewise.
template <typename T>
float squares_of_row(const T* x, int64_t width, float mean) {
  Floats sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
    for (int i = 0; i < 4; ++i) {
      const Floats away = load(x + c + i * kLanes) - mean;
      sums[i] += away * away;
    }
  for (; c + kLanes <= width; c += kLanes) {
    const Floats away = load(x + c) - mean;
    sums[0] += away * away;
  }
  if (c < width) {
    const Floats away = load_some(x + c, width - c, mean) - mean;
    sums[1] += away * away;
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Backward pass of kRows rows of one block at once, so that the partial gradients of weight and bias are read and
// written once for all of them.
template <typename T, int kRows>
void backward_rows(const Norm& shape, const T* grad, const T* grad_added, const T* x, const T* weight,
                   const float* statistics, T* grad_x, float* of_weight, float* of_bias) {
  const int64_t width = shape.width;
  Floats means[kRows], factors[kRows], sums[kRows] = {}, products[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    means[r] = broadcast(statistics[2 * r]);
    factors[r] = broadcast(statistics[2 * r + 1]);
  }
  for_vectors(0, width, [&](int64_t c, int count) {
    const Floats gain = load_lanes(weight + c, count);
    Floats share_of_weight = load_lanes(of_weight + c, count), share_of_bias = load_lanes(of_bias + c, count);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      // The hardware prefetcher tracks only some of this many rows.
      __builtin_prefetch(grad + (r + kRows) * width + c);
      __builtin_prefetch(x + (r + kRows) * width + c);
      const Floats g = load_lanes(grad + r * width + c, count);
      const Floats normed = (load_lanes(x + r * width + c, count) - means[r]) * factors[r];
      const Floats of_normed = g * gain;
      share_of_weight += g * normed;
      share_of_bias += g;
      sums[r] += of_normed;
      products[r] += of_normed * normed;
    }
    store_lanes(of_weight + c, share_of_weight, count);
    store_lanes(of_bias + c, share_of_bias, count);
  });
  for (int r = 0; r < kRows; ++r) {
    const float mean_sum = shape.centred ? sum_of(sums[r]) / width : 0.0f;
    const float mean_product = sum_of(products[r]) / width;
    for_vectors(0, width, [&](int64_t c, int count) {
      const Floats normed = (load_lanes(x + r * width + c, count) - means[r]) * factors[r];
      const Floats of_normed = load_lanes(grad + r * width + c, count) * load_lanes(weight + c, count);
      Floats found = (of_normed - mean_sum - normed * mean_product) * factors[r];
      if (grad_added) found += load_lanes(grad_added + r * width + c, count);
      store_lanes(grad_x + r * width + c, found, count);
    });
  }
}

}  // namespace

template <typename T>
void norm_forward(const Norm& shape, const T* x, const T* residual, const T* weight, const T* bias, T* added, T* out,
                  float* statistics, int64_t first, int64_t last) {
  const int64_t width = shape.width;
  for (int64_t r = first; r < last; ++r) {
    const T* row = x + r * width;
    if (residual) {
      T* sum = added + r * width;
      for_vectors(0, width, [&](int64_t c, int count) {
        store_lanes(sum + c, load_lanes(row + c, count) + load_lanes(residual + r * width + c, count), count);
      });
      row = sum;
    }
    const float mean = shape.centred ? sum_of_row(row, width) / width : 0.0f;
    const float factor = 1.0f / std::sqrt(squares_of_row(row, width, mean) / width + shape.eps);
    statistics[2 * r] = mean;
    statistics[2 * r + 1] = factor;
    T* to = out + r * width;
    for_vectors(0, width, [&](int64_t c, int count) {
      Floats normed = (load_lanes(row + c, count) - mean) * factor * load_lanes(weight + c, count);
      if (bias) normed += load_lanes(bias + c, count);
      __builtin_prefetch(to + width + c, 1);
      store_lanes(to + c, normed, count);
    });
  }
}

template <typename T>
void norm_backward(const Norm& shape, const T* grad, const T* grad_added, const T* x, const T* weight,
                   const float* statistics, T* grad_x, float* partial, int64_t first, int64_t last) {
  const int64_t width = shape.width, block_rows = rows_of_block(shape.rows);
  for (int64_t block = first; block < last; ++block) {
    float *of_weight = partial + 2 * block * width, *of_bias = of_weight + width;
    std::fill(of_weight, of_weight + 2 * width, 0.0f);
    const int64_t stop = std::min((block + 1) * block_rows, shape.rows);
    const auto call = [&](auto rows, int64_t r) {
      const int64_t at = r * width;
      backward_rows<T, rows.value>(shape, grad + at, grad_added ? grad_added + at : nullptr, x + at, weight,
                                   statistics + 2 * r, grad_x + at, of_weight, of_bias);
    };
    int64_t r = block * block_rows;
    for (; r + 4 <= stop; r += 4) call(std::integral_constant<int, 4>{}, r);
    for (; r < stop; ++r) call(std::integral_constant<int, 1>{}, r);
  }
}

#define MEGADS_INSTANTIATE(T)                                                                                         \
  template void norm_forward<T>(const Norm&, const T*, const T*, const T*, const T*, T*, T*, float*, int64_t,         \
                                int64_t);                                                                             \
  template void norm_backward<T>(const Norm&, const T*, const T*, const T*, const T*, const float*, T*, float*,       \
                                 int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
