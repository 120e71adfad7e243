// What all CUDA kernels share: element types, 16-byte accesses, reductions over the threads of a row, launches.
//
// Everything is computed in fp32; bf16 and fp16 are ways to store. Nothing here knows torch. A row is worked on by
// kThreads threads of one block, 32 (a warp, several rows a block) or the whole block, and cut into packs of kWidth
// elements, one 16-byte access each. Packs start at 16-byte borders of the row's own memory, so that of a row of odd
// length, or one that starts anywhere, only the first and last pack are read element by element. Where all rows begin
// and end at such borders (kWhole), as nearly all do, there is no code for parts of packs: on an H200 these kernels
// would else wait for instructions, not for memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "launchers.h"

// Dynamic shared memory of the block.
extern __shared__ __align__(16) unsigned char megads_shared[];

namespace megads::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(uint8_t x) { return float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// exp and x / y of what is stored with fewer digits than the hardware's approximations have, or with all of fp32's.
template <typename T>
__device__ __forceinline__ float exp_for(float x) {
  return sizeof(T) < sizeof(float) ? __expf(x) : expf(x);
}
template <typename T>
__device__ __forceinline__ float quotient_for(float x, float y) {
  return sizeof(T) < sizeof(float) ? __fdividef(x, y) : x / y;
}

// kCount elements that are one access of at most 16 bytes, or several of 16. They are held as words: a compiler that sees
// elements takes words apart and puts them together again.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  static constexpr int kPerWord = 4 / int(sizeof(T));
  uint32_t words[kCount / kPerWord];

  __device__ __forceinline__ T operator[](int i) const {
    const uint32_t bits = words[i / kPerWord] >> (i % kPerWord * 8 * int(sizeof(T)));
    T element;
    memcpy(&element, &bits, sizeof element);
    return element;
  }

  // Of a pack that is zero there.
  __device__ __forceinline__ void set(int i, T element) {
    uint32_t bits = 0;
    memcpy(&bits, &element, sizeof element);
    words[i / kPerWord] |= bits << (i % kPerWord * 8 * int(sizeof(T)));
  }
};

// Elements of one 16-byte access.
template <typename T>
constexpr int kWidth = 16 / int(sizeof(T));

// All elements of a pack in fp32: of bf16, which is the upper half of fp32, by one instruction each.
template <typename T, int kCount>
__device__ __forceinline__ void widen_pack(const Pack<T, kCount>& pack, float (&values)[kCount]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      values[2 * i] = __uint_as_float(pack.words[i] << 16);
      values[2 * i + 1] = __uint_as_float(pack.words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = widen(pack[i]);
  }
}

// Rounds fp32 numbers to a pack, two by one instruction.
template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> narrow_pack(const float (&values)[kCount]) {
  Pack<T, kCount> pack{};
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      memcpy(&pack.words[i], &pair, sizeof pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.set(i, narrow<T>(values[i]));
  }
  return pack;
}

// Whether rows of so many elements begin and end at borders of packs, in each of these tensors; null is none.
template <typename T>
bool are_whole(int64_t width, std::initializer_list<const void*> tensors) {
  if (width % kWidth<T> != 0) return false;
  for (const void* tensor : tensors)
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return false;
  return true;
}

// How many elements the row's first pack lacks: it starts at the 16-byte border at or below the row.
template <bool kWhole = false, typename T>
__device__ __forceinline__ int shift_of(const T* row) {
  return kWhole ? 0 : int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
}

// Whether elements first..first + kCount - 1 all lie in the row, at an address that a whole access takes.
template <int kCount, bool kWhole = false, typename T>
__device__ __forceinline__ bool is_whole(const T* row, int first, int count) {
  return kWhole ? first < count
                : first >= 0 && first <= count - kCount &&
                      reinterpret_cast<uintptr_t>(row + first) % alignof(Pack<T, kCount>) == 0;
}

// Whether an element of a pack that holds some of the row's is one of them.
template <bool kWhole>
__device__ __forceinline__ bool is_inside(int column, int count) {
  return kWhole || (column >= 0 && column < count);
}

template <int kCount, typename T>
__device__ __forceinline__ Pack<T, kCount> load_elements(const T* row, int first, int count) {
  Pack<T, kCount> pack{};
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (first + i >= 0 && first + i < count) pack.set(i, row[first + i]);
  return pack;
}

// Elements first..first + kCount - 1 of a row of `count`; 0 where it has none.
template <int kCount, bool kWhole = false, typename T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* row, int first, int count) {
  if (is_whole<kCount, kWhole>(row, first, count)) return *reinterpret_cast<const Pack<T, kCount>*>(row + first);
  return kWhole ? Pack<T, kCount>{} : load_elements<kCount>(row, first, count);
}

// Packs at first, first + step, ...: all whole ones are asked for before any of them is used. Those that hold nothing
// of elements begin..end - 1 are not read, and are 0.
template <bool kWhole = false, int kCount, int kPacks, typename T>
__device__ __forceinline__ void load_packs(Pack<T, kCount> (&packs)[kPacks], const T* row, int first, int step,
                                           int count, int begin, int end) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = first + p * step;
    packs[p] = Pack<T, kCount>{};
    if (at < end && at + kCount > begin && is_whole<kCount, kWhole>(row, at, count))
      packs[p] = *reinterpret_cast<const Pack<T, kCount>*>(row + at);
  }
  if constexpr (!kWhole) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * step;
      if (at < end && at + kCount > begin && !is_whole<kCount>(row, at, count))
        packs[p] = load_elements<kCount>(row, at, count);
    }
  }
}

// Stores what of elements first..first + kCount - 1 the row has.
template <bool kWhole = false, typename T, int kCount>
__device__ __forceinline__ void store_pack(T* row, int first, int count, const float (&values)[kCount]) {
  const Pack<T, kCount> pack = narrow_pack<T>(values);
  if (is_whole<kCount, kWhole>(row, first, count)) {
    *reinterpret_cast<Pack<T, kCount>*>(row + first) = pack;
  } else if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (first + i >= 0 && first + i < count) row[first + i] = pack[i];
  }
}

struct Sum {
  static constexpr float kNothing = 0.0f;
  static __device__ __forceinline__ float of(float x, float y) { return x + y; }
};

// Of NaN and a number it is the number: kernels let a NaN through by the sum that follows.
struct Largest {
  static constexpr float kNothing = -kInfinity;
  static __device__ __forceinline__ float of(float x, float y) { return fmaxf(x, y); }
};

template <typename Reduction>
__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    x = Reduction::of(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

// Reduces over the kThreads threads of a row; every one of them gets the result, the same bits on every run.
// One barrier a call: calls take turns with two places in shared memory, and nobody comes to the second next call
// before all have read the results of this one.
template <int kThreads>
class RowReduction {
 public:
  static constexpr int kSharedBytes = kThreads > kWarp ? 2 * 2 * kWarp * int(sizeof(float)) : 0;

  template <typename Reduction>
  __device__ __forceinline__ float operator()(float x) {
    float unused = Reduction::kNothing;
    both<Reduction, false>(x, unused);
    return x;
  }

  // Two at once, behind the same barrier.
  template <typename Reduction, bool kBoth = true>
  __device__ __forceinline__ void both(float& x, float& y) {
    x = over_warp<Reduction>(x);
    if (kBoth) y = over_warp<Reduction>(y);
    if constexpr (kThreads > kWarp) {
      const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
      float* place = reinterpret_cast<float*>(megads_shared) + turn_ * 2 * kWarp;
      turn_ ^= 1;
      if (lane == 0) {
        place[warp] = x;
        if (kBoth) place[kWarp + warp] = y;
      }
      __syncthreads();
      const bool used = lane < kThreads / kWarp;
      x = over_warp<Reduction>(used ? place[lane] : Reduction::kNothing);
      if (kBoth) y = over_warp<Reduction>(used ? place[kWarp + lane] : Reduction::kNothing);
    }
  }

 private:
  int turn_ = 0;
};

// Threads of a block whose rows take kThreads threads each.
template <int kThreads>
constexpr int kBlock = kThreads > 128 ? kThreads : 128;

// What one block does of flat memory: a chunk that starts at a 16-byte border of `anchor`.
struct Share {
  int64_t lower;  // the share's first element that there is; what follows is counted from it
  int first;      // of the chunk: below 0 where the memory starts behind a border
  int count;      // up to the end of the memory, as far as the share can reach
};

template <bool kWhole = false, typename T>
__device__ __forceinline__ Share share_of(const T* anchor, int64_t count, int chunk) {
  const int64_t origin = int64_t(blockIdx.x) * chunk - shift_of<kWhole>(anchor);
  const int64_t lower = origin > 0 ? origin : 0;
  const int64_t left = count - lower, reach = int64_t(chunk) + 16;
  return {lower, int(origin - lower), int(left < reach ? left : reach)};
}

constexpr int64_t kMostBlocks = 2147483647;

inline int64_t blocks_for(int64_t count, int64_t of_one) { return (count + of_one - 1) / of_one; }

// Blocks that share `count` elements, wherever they start.
inline int64_t shares_for(int64_t count, int64_t chunk) { return blocks_for(count + 15, chunk); }

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, int64_t stream,
           Arguments... arguments) {
  constexpr int kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return int(error);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  return int(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Calls body with a null pointer of the element type that `dtype` numbers.
template <typename Body>
int with_dtype(int64_t dtype, Body body) {
  switch (dtype) {
    case MEGADS_FP32: return body(static_cast<float*>(nullptr));
    case MEGADS_BF16: return body(static_cast<__nv_bfloat16*>(nullptr));
    case MEGADS_FP16: return body(static_cast<__half*>(nullptr));
  }
  return int(cudaErrorInvalidValue);
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls body with the smallest number of threads, of those that there are kernels for, that hold a row of `columns`
// with `values` elements each; with kMost where none does, and the row is then read in chunks.
template <int kMost = 1024, typename Body>
int with_threads(int64_t columns, int64_t values, Body body) {
  if (columns <= 32 * values) return body(Constant<32>{});
  if (columns <= 128 * values) return body(Constant<128>{});
  if (columns <= 256 * values) return body(Constant<256>{});
  if (kMost == 512 || columns <= 512 * values) return body(Constant<512>{});
  return body(Constant<kMost>{});
}

}  // namespace megads::cuda
