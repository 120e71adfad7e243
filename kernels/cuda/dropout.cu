// Dropout of hidden states (Srivastava et al. 2014) with an optional fused residual addition; see launchers.h.
//
// A thread computes one pack. Traffic: 2 * count * size bytes, plus count * size with a residual. The mask is
// generated, not read: one Philox counter for eight features; a pack that spans the end of a row takes one for each
// row's part.
#include "philox.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 256;

struct HiddenDropout {
  int64_t count;
  uint32_t tokens, width;
  const int64_t* places;
  DropoutMask mask;
};

// Bit i is set if element first + i of the tensor is kept; bits outside the tensor are undefined. With kWhole a pack
// lies within one row.
template <int kCount, bool kWhole>
__device__ __forceinline__ uint32_t draw_flat(const HiddenDropout& shape, int64_t first) {
  uint32_t kept = 0;
  for (int done = 0; done < kCount;) {
    const int64_t at = first + done;
    if (at >= shape.count) break;
    if (at < 0) {
      ++done;
      continue;
    }
    // A 64-bit division takes as long as generating the mask.
    const uint32_t row = shape.count >> 32 ? uint32_t(at / shape.width) : uint32_t(at) / shape.width;
    const uint32_t column = uint32_t(at - int64_t(row) * shape.width);
    const uint32_t token = row % shape.tokens;
    const MaskRow drawn(shape.mask, row / shape.tokens, 0, shape.places ? shape.places[token] : int64_t(token));
    kept |= drawn.draw_pack<kCount>(shape.mask, int(column)) << done;
    if constexpr (kWhole) break;
    const uint32_t left = shape.width - column;  // bits past the end of the row are generated again
    if (left >= uint32_t(kCount - done)) break;
    done += int(left);
    kept &= (1u << done) - 1;
  }
  return kept;
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) dropout(HiddenDropout shape, const T* x, const T* residual, T* out) {
  const Share share = share_of<kWhole>(x, shape.count, kThreads * kWidth<T>);
  const int first = share.first + int(threadIdx.x) * kWidth<T>;
  if (first >= share.count) return;
  float values[kWidth<T>], more[kWidth<T>] = {};
  widen_pack(load_pack<kWidth<T>, kWhole>(x + share.lower, first, share.count), values);
  if (residual) widen_pack(load_pack<kWidth<T>, kWhole>(residual + share.lower, first, share.count), more);
  const uint32_t kept = draw_flat<kWidth<T>, kWhole>(shape, share.lower + first);
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    // Multiplied, not selected, so that non-finite values propagate.
    values[i] *= kept >> i & 1 ? shape.mask.scale : 0.0f;
    if (residual) values[i] += more[i];
  }
  store_pack<kWhole>(out + share.lower, first, share.count, values);
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_dropout(int64_t dtype, int64_t batch, int64_t tokens, int64_t width, const void* x,
                                   const void* residual, const int64_t* places, const int64_t* samples, int64_t key,
                                   int64_t threshold, void* out, int64_t stream) {
  const int64_t count = batch * tokens * width;
  if (count == 0) return 0;
  if (batch * tokens > kMostBlocks || width > kMostBlocks) return int(MEGADS_TOO_LARGE);
  const HiddenDropout shape{count, uint32_t(tokens), uint32_t(width), places, mask_of(samples, key, threshold, 0)};
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t blocks = shares_for(count, kThreads * kWidth<T>);
    if (blocks > kMostBlocks) return int(MEGADS_TOO_LARGE);
    const bool whole = are_whole<T>(width, {x, residual, out});
    return launch(whole ? dropout<T, true> : dropout<T, false>, dim3(unsigned(blocks)), kThreads, 0, stream, shape,
                  static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<T*>(out));
  });
}
