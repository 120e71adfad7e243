// GELU (tanh approximation) as x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3); see launchers.h.
//
// Without a bias, memory is flat and a thread computes two packs. Traffic: 2 * elements * size bytes forward, 3
// backward.
//
// With a bias, a block processes a strip of columns, one pack per lane, and each of its warps one row at a time. A
// thread thus uses the bias of the same columns for all its rows and accumulates their gradients in registers. The sums
// of the 8 warps are reduced through shared memory, those of the blocks by columns.cuh.
#include "columns.cuh"

namespace megads::cuda {
namespace {

constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

// Beyond +-kFar the derivative is 0 or 1 in fp32; within it the exponential below is finite.
constexpr float kFar = 10.0f;

constexpr int kThreads = 256, kPacks = 2, kWarps = kThreads / kWarp;

template <typename T>
__device__ __forceinline__ float gelu_of(float x) {
  return quotient_for<T>(x, 1.0f + exp_for<T>(x * (-kTwiceRoot - kTwiceRoot * kCubic * (x * x))));
}

template <typename T>
__device__ __forceinline__ float slope_of(float x) {
  x = x > kFar ? kFar : x < -kFar ? -kFar : x;  // NaN stays NaN
  const float square = x * x;
  const float away = exp_for<T>(x * (-kTwiceRoot - kTwiceRoot * kCubic * square));
  const float sigmoid = quotient_for<T>(1.0f, 1.0f + away);
  // 1 - sigmoid, without cancellation where it is small.
  const float rest = away * sigmoid;
  return sigmoid + x * sigmoid * rest * (kTwiceRoot + 3.0f * kTwiceRoot * kCubic * square);
}

// grad is null in the forward pass. kWhole: the memory starts and ends on pack boundaries.
template <typename T, bool kBackward, bool kWhole>
__global__ void __launch_bounds__(kThreads) gelu_flat(int64_t count, const T* grad, const T* x, T* out) {
  constexpr int kStep = kThreads * kWidth<T>;
  const Share share = share_of<kWhole>(x, count, kStep * kPacks);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  Pack<T, kWidth<T>> x_packs[kPacks], grad_packs[kPacks];
  load_packs<kWhole>(x_packs, x + share.lower, first, kStep, share.count, 0, share.count);
  if (kBackward) load_packs<kWhole>(grad_packs, grad + share.lower, first, kStep, share.count, 0, share.count);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float values[kWidth<T>], grads[kWidth<T>];
    widen_pack(x_packs[p], values);
    if (kBackward) widen_pack(grad_packs[p], grads);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i)
      values[i] = kBackward ? grads[i] * slope_of<T>(values[i]) : gelu_of<T>(values[i]);
    store_pack<kWhole>(out + share.lower, first + p * kStep, share.count, values);
  }
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    bias_gelu(int rows, int width, const T* grad, const T* x, const T* __restrict__ bias, T* out,
              float* __restrict__ partial) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int column = (int(blockIdx.x) * kWarp + lane) * kWidth<T>;
  float biases[kWidth<T>], sums[kWidth<T>] = {};
  widen_pack(load_pack<kWidth<T>>(bias, column, width), biases);
  for (int row = int(blockIdx.y) * kWarps + warp; row < rows; row += int(gridDim.y) * kWarps) {
    const int64_t offset = int64_t(row) * width;
    float values[kWidth<T>], grads[kWidth<T>];
    widen_pack(load_pack<kWidth<T>>(x + offset, column, width), values);
    if (kBackward) widen_pack(load_pack<kWidth<T>>(grad + offset, column, width), grads);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      const float at = values[i] + biases[i];
      values[i] = kBackward ? grads[i] * slope_of<T>(at) : gelu_of<T>(at);
      sums[i] += values[i];
    }
    store_pack(out + offset, column, width, values);
  }
  if (!kBackward) return;
  // Consecutive lanes use consecutive words, which avoids bank conflicts.
  float* shared = reinterpret_cast<float*>(megads_shared) + warp * kWarp * kWidth<T>;
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) shared[i * kWarp + lane] = sums[i];
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i)
    for (int other = 1; other < kWarps; ++other) sums[i] += shared[(other * kWidth<T> + i) * kWarp + lane];
  store_pack(partial + int64_t(blockIdx.y) * width, column, width, sums);
}

// Blocks along the rows: one per 32 rows, but no more than fill a device.
int64_t row_blocks(int64_t rows, int64_t width) {
  const int64_t most = blocks_for(132 * 8, blocks_for(width, kWarp * 8)), wanted = blocks_for(rows, 32);
  return wanted < most ? wanted : most;
}

template <bool kBackward>
int pass(int64_t dtype, int64_t rows, int64_t width, const void* grad, const void* x, const void* bias, void* out,
         float* partial, int64_t stream) {
  if (rows == 0 || width == 0) return 0;
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T *of_grad = static_cast<const T*>(grad), *of_x = static_cast<const T*>(x);
    if (!bias) {
      const int64_t blocks = shares_for(rows * width, kThreads * kPacks * kWidth<T>);
      if (blocks > kMostBlocks) return int(MEGADS_TOO_LARGE);
      const bool whole = are_whole<T>(rows * width, {grad, x, out});
      return launch(whole ? gelu_flat<T, kBackward, true> : gelu_flat<T, kBackward, false>, dim3(unsigned(blocks)),
                    kThreads, 0, stream, rows * width, of_grad, of_x, static_cast<T*>(out));
    }
    if (rows > kMostBlocks / 2 || width > kMostBlocks / 2) return int(MEGADS_TOO_LARGE);
    const dim3 grid(unsigned(blocks_for(width, kWarp * kWidth<T>)), unsigned(row_blocks(rows, width)));
    return launch(bias_gelu<T, kBackward>, grid, kThreads, kBackward ? kThreads * kWidth<T> * int(sizeof(float)) : 0,
                  stream, int(rows), int(width), of_grad, of_x, static_cast<const T*>(bias), static_cast<T*>(out),
                  partial);
  });
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_gelu_forward(int64_t dtype, int64_t rows, int64_t width, const void* x, const void* bias,
                                        void* out, int64_t stream) {
  return pass<false>(dtype, rows, width, nullptr, x, bias, out, nullptr, stream);
}

extern "C" int64_t megads_cuda_gelu_partials(int64_t rows, int64_t width) { return row_blocks(rows, width); }

extern "C" int megads_cuda_gelu_backward(int64_t dtype, int64_t rows, int64_t width, const void* grad, const void* x,
                                         const void* bias, void* grad_x, float* partial, void* grad_bias,
                                         int64_t stream) {
  const int error = pass<true>(dtype, rows, width, grad, x, bias, grad_x, partial, stream);
  if (error || !bias || width == 0) return error;
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    return launch_sum_columns<T>(partial, rows ? row_blocks(rows, width) : 0, width, width, grad_bias, stream);
  });
}
