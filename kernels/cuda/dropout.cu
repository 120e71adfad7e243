// The mask of a dropout (Srivastava et al. 2014), and what its result is added to; see launchers.h.
//
// A thread computes a pack: 2 * count * size + count bytes, with a residual another count * size. The mask has a byte an
// element, so that a pack of it is an access of 4 or 8 bytes.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dropout(int64_t count, const T* x, const uint8_t* keep, float scale, const T* residual, T* out) {
  const Share share = share_of(x, count, kThreads * kWidth<T>);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  const auto of_x = load_pack<kWidth<T>>(x + share.lower, first, share.count);
  const auto kept = load_pack<kWidth<T>>(keep + share.lower, first, share.count);
  Pack<T, kWidth<T>> of_residual{};
  if (residual) of_residual = load_pack<kWidth<T>>(residual + share.lower, first, share.count);
  float values[kWidth<T>];
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    // Multiplied, not chosen: what is not finite is not to vanish.
    values[i] = widen(of_x.elements[i]) * (widen(kept.elements[i]) * scale);
    if (residual) values[i] += widen(of_residual.elements[i]);
  }
  store_pack(out + share.lower, first, share.count, values);
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_dropout(int64_t dtype, int64_t count, const void* x, const uint8_t* keep, double scale,
                                   const void* residual, void* out, int64_t stream) {
  if (count == 0) return 0;
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t blocks = shares_for(count, kThreads * kWidth<T>);
    if (blocks > kMostBlocks) return int(MEGADS_TOO_LARGE);
    return launch(dropout<T>, dim3(unsigned(blocks)), kThreads, 0, stream, count, static_cast<const T*>(x), keep,
                  float(scale), static_cast<const T*>(residual), static_cast<T*>(out));
  });
}
