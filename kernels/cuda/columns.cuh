// Column reductions in two steps of fixed order and without atomics: the same input gives bitwise identical results.
#pragma once

#include "device.cuh"

namespace megads::cuda {

constexpr int kColumnGroups = 8;  // warps that split the rows of `partial` among them

// Second step: sums[c] = sum over r of partial[r * stride + c] for columns c < width, in the gradient's element type. A
// block processes 32 columns: lane l of warp g sums column l of rows g, g + 8, ..., then warp 0 adds the 8 partial sums
// in order.
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
