// SwiGLU (Shazeer 2020) of interleaved gates and ups; see launchers.h.
//
// A thread computes one pack of outputs from the two packs of (gate, up) pairs for it. Traffic: 3 * count * size bytes
// forward, 5 backward.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ float sigmoid_of(float x) {
  return quotient_for<T>(1.0f, 1.0f + exp_for<T>(-x));
}

// kWhole: the memory starts and ends on pack boundaries.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) swiglu_forward(int64_t count, const T* gate_up, T* out) {
  const Share share = share_of<kWhole>(out, count, kThreads * kWidth<T>);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  float pairs[2 * kWidth<T>], values[kWidth<T>];
  widen_pack(load_pack<2 * kWidth<T>, kWhole>(gate_up + 2 * share.lower, 2 * first, 2 * share.count), pairs);
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) values[i] = pairs[2 * i] * sigmoid_of<T>(pairs[2 * i]) * pairs[2 * i + 1];
  store_pack<kWhole>(out + share.lower, first, share.count, values);
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward(int64_t count, const T* grad, const T* gate_up, T* grad_gate_up) {
  const Share share = share_of<kWhole>(grad, count, kThreads * kWidth<T>);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  float slopes[kWidth<T>], pairs[2 * kWidth<T>];
  widen_pack(load_pack<kWidth<T>, kWhole>(grad + share.lower, first, share.count), slopes);
  widen_pack(load_pack<2 * kWidth<T>, kWhole>(gate_up + 2 * share.lower, 2 * first, 2 * share.count), pairs);
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    const float gate = pairs[2 * i], up = pairs[2 * i + 1], sigmoid = sigmoid_of<T>(gate);
    // sigmoid_of(-gate) is 1 - sigmoid, without cancellation where it is small.
    pairs[2 * i] = slopes[i] * up * sigmoid * (1.0f + gate * sigmoid_of<T>(-gate));
    pairs[2 * i + 1] = slopes[i] * gate * sigmoid;
  }
  store_pack<kWhole>(grad_gate_up + 2 * share.lower, 2 * first, 2 * share.count, pairs);
}

template <typename T>
int64_t blocks_of(int64_t count) {
  return shares_for(count, kThreads * kWidth<T>);
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_swiglu_forward(int64_t dtype, int64_t count, const void* gate_up, void* out,
                                          int64_t stream) {
  if (count == 0) return 0;
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (blocks_of<T>(count) > kMostBlocks) return int(MEGADS_TOO_LARGE);
    const bool whole = are_whole<T>(count, {gate_up, out});
    return launch(whole ? swiglu_forward<T, true> : swiglu_forward<T, false>, dim3(unsigned(blocks_of<T>(count))),
                  kThreads, 0, stream, count, static_cast<const T*>(gate_up), static_cast<T*>(out));
  });
}

extern "C" int megads_cuda_swiglu_backward(int64_t dtype, int64_t count, const void* grad, const void* gate_up,
                                           void* grad_gate_up, int64_t stream) {
  if (count == 0) return 0;
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (blocks_of<T>(count) > kMostBlocks) return int(MEGADS_TOO_LARGE);
    const bool whole = are_whole<T>(count, {grad, gate_up, grad_gate_up});
    return launch(whole ? swiglu_backward<T, true> : swiglu_backward<T, false>, dim3(unsigned(blocks_of<T>(count))),
                  kThreads, 0, stream, count, static_cast<const T*>(grad), static_cast<const T*>(gate_up),
                  static_cast<T*>(grad_gate_up));
  });
}
