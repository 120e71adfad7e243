// Sums of columns in two steps of a fixed order: no atomics, so that the same input gives the same bits.
#pragma once

#include "device.cuh"

namespace megads::cuda {

constexpr int kColumnGroups = 8;  // of threads that share the rows of `partial` among them

// Second step: sums[c] = sum over r of partial[r * stride + c], columns c < width, in the element type of the gradient.
// A block takes 32 columns: lane l of warp g sums column l of rows g, g + 8, ..., and warp 0 the 8 sums, in order.
template <typename T>
__global__ void __launch_bounds__(kWarp* kColumnGroups)
    sum_columns(const float* __restrict__ partial, int rows, int64_t stride, int width, T* __restrict__ sums) {
  float* shared = reinterpret_cast<float*>(megads_shared);
  const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp;
  const int column = blockIdx.x * kWarp + lane;
  float sum = 0.0f;
  if (column < width)
    for (int row = group; row < rows; row += kColumnGroups) sum += partial[row * stride + column];
  shared[group * kWarp + lane] = sum;
  __syncthreads();
  if (group != 0 || column >= width) return;
#pragma unroll
  for (int other = 1; other < kColumnGroups; ++other) sum += shared[other * kWarp + lane];
  sums[column] = narrow<T>(sum);
}

template <typename T>
int launch_sum_columns(const float* partial, int64_t rows, int64_t stride, int64_t width, void* sums, int64_t stream) {
  const dim3 grid(unsigned(blocks_for(width, kWarp)));
  return launch(sum_columns<T>, grid, kWarp * kColumnGroups, kWarp * kColumnGroups * int(sizeof(float)), stream,
                partial, int(rows), stride, int(width), static_cast<T*>(sums));
}

}  // namespace megads::cuda
