// Rotary position embedding (Su et al. 2021, RoFormer); see launchers.h.
//
// A block handles one token. A thread rotates one pack from the first half of a head and the matching pack from the
// second half. Traffic: 2 * elements * size bytes; the cos and sin tables come from the cache for all heads but the
// first.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 128;

struct Heads {
  int tokens, heads, pairs;
  int64_t batch_stride, token_stride, head_stride;
  int64_t table_rows;
  float direction;  // of the rotation: 1, or -1 for the inverse
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    rotary(Heads shape, const T* x, const float* __restrict__ cosines, const float* __restrict__ sines, T* out) {
  const int packs = (shape.pairs + kWidth<T> - 1) / kWidth<T>;
  const int item = int(blockIdx.y) * kThreads + int(threadIdx.x);
  const int head = item / packs, first = item % packs * kWidth<T>;
  if (head >= shape.heads) return;
  const int64_t token = blockIdx.x, pairs = shape.pairs;
  const int64_t sample = token / shape.tokens, place = token % shape.tokens;
  const T* from = x + sample * shape.batch_stride + place * shape.token_stride + head * shape.head_stride;
  T* to = out + (token * shape.heads + head) * 2 * pairs;
  const int64_t angles = token % shape.table_rows * pairs;
  const auto left = load_pack<kWidth<T>>(from, first, shape.pairs);
  const auto right = load_pack<kWidth<T>>(from + pairs, first, shape.pairs);
  const auto cosine = load_pack<kWidth<T>>(cosines + angles, first, shape.pairs);
  const auto sine = load_pack<kWidth<T>>(sines + angles, first, shape.pairs);
  float left_turned[kWidth<T>], right_turned[kWidth<T>];
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    const float along = widen(left[i]), across = widen(right[i]);
    const float turn = shape.direction * sine[i];
    left_turned[i] = along * cosine[i] - across * turn;
    right_turned[i] = across * cosine[i] + along * turn;
  }
  store_pack(to, first, shape.pairs, left_turned);
  store_pack(to + pairs, first, shape.pairs, right_turned);
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_rotary(int64_t dtype, int64_t batch, int64_t tokens, int64_t heads, int64_t dim,
                                  int64_t batch_stride, int64_t token_stride, int64_t head_stride, int64_t table_rows,
                                  int64_t inverse, const void* x, const float* cos, const float* sin, void* out,
                                  int64_t stream) {
  if (batch == 0 || tokens == 0 || heads == 0 || dim == 0) return 0;
  if (dim % 2 || table_rows <= 0) return int(cudaErrorInvalidValue);
  if (batch * tokens > kMostBlocks || heads * dim > 65535 * kThreads) return int(MEGADS_TOO_LARGE);
  const Heads shape{int(tokens),  int(heads),  int(dim / 2), batch_stride,
                    token_stride, head_stride, table_rows,   inverse ? -1.0f : 1.0f};
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t items = heads * blocks_for(dim / 2, kWidth<T>);
    const dim3 grid(unsigned(batch * tokens), unsigned(blocks_for(items, kThreads)));
    return launch(rotary<T>, grid, kThreads, 0, stream, shape, static_cast<const T*>(x), cos, sin,
                  static_cast<T*>(out));
  });
}
