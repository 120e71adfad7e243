// Optimizer step over flat buffers: squared norms and AdamW; see launchers.h. There is no host synchronization between
// them: the clip factor, and with it the decision whether to skip the step, stays on the device.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 256, kPacks = 4;

__device__ __forceinline__ double over_warp(double x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// Block (p, b) sums chunks b, b + gridDim.y, ... of piece p, in fp64 so that squares do not overflow and small ones are
// not lost.
__global__ void __launch_bounds__(kThreads)
    square_sums(const float* __restrict__ flat, const int64_t* __restrict__ bounds, double* __restrict__ partial) {
  constexpr int kStep = kThreads * 4, kChunk = kStep * kPacks;
  const int64_t begin = bounds[2 * int64_t(blockIdx.x)];
  const float* piece = flat + begin;
  const int64_t count = bounds[2 * int64_t(blockIdx.x) + 1] - begin;
  double sum = 0.0;
  for (int64_t origin = int64_t(blockIdx.y) * kChunk; origin < count + 3; origin += int64_t(gridDim.y) * kChunk) {
    // Same as share_of, for block index origin / kChunk.
    const int64_t shifted = origin - shift_of(piece), lower = shifted > 0 ? shifted : 0;
    const int64_t left = count - lower;
    const int reach = int(left < kChunk + 16 ? left : kChunk + 16);
    Pack<float, 4> packs[kPacks];
    load_packs(packs, piece + lower, int(shifted - lower) + int(threadIdx.x) * 4, kStep, reach, 0, reach);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += double(packs[p][i]) * double(packs[p][i]);
  }
  double* shared = reinterpret_cast<double*>(megads_shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  sum = over_warp(sum);
  if (lane == 0) shared[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  sum = over_warp(lane < kThreads / kWarp ? shared[lane] : 0.0);
  if (lane == 0) partial[int64_t(blockIdx.x) * gridDim.y + blockIdx.y] = sum;
}

// One warp per piece.
__global__ void __launch_bounds__(kWarp)
    sum_partials(const double* __restrict__ partial, int blocks, double* __restrict__ sums) {
  double sum = 0.0;
  const double* of_piece = partial + int64_t(blockIdx.x) * blocks;
  for (int block = int(threadIdx.x); block < blocks; block += kWarp) sum += of_piece[block];
  sum = over_warp(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

struct AdamWFactors {
  float decay;            // learning rate times weight decay
  float rest1;            // 1 - beta1
  float beta2, rest2;     // beta2 and 1 - beta2
  float step_size;        // learning rate / (1 - beta1^step)
  float root_correction;  // sqrt(1 - beta2^step)
  float eps;
};

// A thread updates 4 elements: it reads 64 bytes, issuing all loads before their results are used, and writes 48 bytes
// and 4 weights.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    adamw(int64_t count, const float* __restrict__ grad, float* __restrict__ master, float* __restrict__ exp_avg,
          float* __restrict__ exp_avg_sq, T* weights, const float* __restrict__ clip, AdamWFactors factors) {
  const float scale = *clip;
  if (!(fabsf(scale) < kInfinity)) return;  // skip the step: all threads read the same value
  const Share share = share_of(master, count, kThreads * 4);
  const int first = share.first + int(threadIdx.x) * 4;
  const auto of_grad = load_pack<4>(grad + share.lower, first, share.count);
  const auto of_master = load_pack<4>(master + share.lower, first, share.count);
  const auto of_avg = load_pack<4>(exp_avg + share.lower, first, share.count);
  const auto of_avg_sq = load_pack<4>(exp_avg_sq + share.lower, first, share.count);
  float new_master[4], new_avg[4], new_avg_sq[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float g = of_grad[i] * scale;
    new_avg[i] = of_avg[i] + factors.rest1 * (g - of_avg[i]);
    new_avg_sq[i] = factors.beta2 * of_avg_sq[i] + factors.rest2 * g * g;
    const float root = sqrtf(new_avg_sq[i]) / factors.root_correction + factors.eps;
    const float kept = of_master[i] - factors.decay * of_master[i];
    new_master[i] = kept - factors.step_size * new_avg[i] / root;
  }
  store_pack(master + share.lower, first, share.count, new_master);
  store_pack(exp_avg + share.lower, first, share.count, new_avg);
  store_pack(exp_avg_sq + share.lower, first, share.count, new_avg_sq);
  store_pack(weights + share.lower, first, share.count, new_master);
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_square_sums(int64_t pieces, const float* flat, const int64_t* bounds, double* partial,
                                       double* sums, int64_t stream) {
  if (pieces == 0) return 0;
  if (pieces > kMostBlocks) return int(MEGADS_TOO_LARGE);
  const dim3 grid(unsigned(pieces), MEGADS_SQUARE_SUM_BLOCKS);
  const int error =
      launch(square_sums, grid, kThreads, kThreads / kWarp * int(sizeof(double)), stream, flat, bounds, partial);
  if (error) return error;
  return launch(sum_partials, dim3(unsigned(pieces)), kWarp, 0, stream, partial, int(MEGADS_SQUARE_SUM_BLOCKS), sums);
}

extern "C" int megads_cuda_adamw(int64_t dtype, int64_t count, const float* grad, float* master, float* exp_avg,
                                 float* exp_avg_sq, void* weights, const float* clip, double lr, double weight_decay,
                                 double beta1, double beta2, double eps, int64_t step, int64_t stream) {
  if (count == 0) return 0;
  const int64_t blocks = shares_for(count, kThreads * 4);
  if (step < 1) return int(cudaErrorInvalidValue);
  if (blocks > kMostBlocks) return int(MEGADS_TOO_LARGE);
  const AdamWFactors factors{float(lr * weight_decay),
                             float(1.0 - beta1),
                             float(beta2),
                             float(1.0 - beta2),
                             float(lr / (1.0 - std::pow(beta1, double(step)))),
                             float(std::sqrt(1.0 - std::pow(beta2, double(step)))),
                             float(eps)};
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    return launch(adamw<T>, dim3(unsigned(blocks)), kThreads, 0, stream, count, grad, master, exp_avg, exp_avg_sq,
                  static_cast<T*>(weights), clip, factors);
  });
}
