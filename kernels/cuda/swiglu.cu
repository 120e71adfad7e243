// The gated linear unit of SwiGLU (Shazeer 2020), gates and ups in pairs; see launchers.h.
//
// A thread computes one pack of outputs from the two packs of pairs below it: 3 * count * size bytes forward, 5
// backward.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_forward(int64_t count, const T* gate_up, T* out) {
  const Share share = share_of(out, count, kThreads * kWidth<T>);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  const auto pairs = load_pack<2 * kWidth<T>>(gate_up + 2 * share.lower, 2 * first, 2 * share.count);
  float values[kWidth<T>];
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    const float gate = widen(pairs.elements[2 * i]);
    values[i] = gate * sigmoid_of(gate) * widen(pairs.elements[2 * i + 1]);
  }
  store_pack(out + share.lower, first, share.count, values);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward(int64_t count, const T* grad, const T* gate_up, T* grad_gate_up) {
  const Share share = share_of(grad, count, kThreads * kWidth<T>);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  const auto of_grad = load_pack<kWidth<T>>(grad + share.lower, first, share.count);
  const auto pairs = load_pack<2 * kWidth<T>>(gate_up + 2 * share.lower, 2 * first, 2 * share.count);
  float values[2 * kWidth<T>];
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    const float gate = widen(pairs.elements[2 * i]), up = widen(pairs.elements[2 * i + 1]);
    const float slope = widen(of_grad.elements[i]), sigmoid = sigmoid_of(gate);
    // sigmoid_of(-gate) is 1 - sigmoid without the cancellation where it is small.
    values[2 * i] = slope * up * sigmoid * (1.0f + gate * sigmoid_of(-gate));
    values[2 * i + 1] = slope * gate * sigmoid;
  }
  store_pack(grad_gate_up + 2 * share.lower, 2 * first, 2 * share.count, values);
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
    return launch(swiglu_forward<T>, dim3(unsigned(blocks_of<T>(count))), kThreads, 0, stream, count,
                  static_cast<const T*>(gate_up), static_cast<T*>(out));
  });
}

extern "C" int megads_cuda_swiglu_backward(int64_t dtype, int64_t count, const void* grad, const void* gate_up,
                                           void* grad_gate_up, int64_t stream) {
  if (count == 0) return 0;
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (blocks_of<T>(count) > kMostBlocks) return int(MEGADS_TOO_LARGE);
    return launch(swiglu_backward<T>, dim3(unsigned(blocks_of<T>(count))), kThreads, 0, stream, count,
                  static_cast<const T*>(grad), static_cast<const T*>(gate_up), static_cast<T*>(grad_gate_up));
  });
}
