// Shared by all CUDA kernels: element types, 16-byte vectorized loads and stores, row reductions and kernel launches.
//
// All arithmetic is in fp32; bf16 and fp16 are storage types only. Nothing here depends on torch. A row is processed by
// kThreads threads of one block: one warp (32 threads, several rows per block) or the whole block. It is split into
// packs of kWidth elements, one 16-byte access each. Packs are aligned to 16 bytes in the row's own memory, so that
// rows of any length and start address need element-wise access for their first and last pack only. If all rows start
// and end on 16-byte boundaries (kWhole), as nearly all do, the code for partial packs is compiled out: on an H200 it
// would make these kernels instruction-bound instead of memory-bound.
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

// exp and x / y: fast hardware approximations if the result is stored in bf16 or fp16, which are less precise than the
// approximations; full fp32 precision otherwise.
template <typename T>
__device__ __forceinline__ float exp_for(float x) {
  return sizeof(T) < sizeof(float) ? __expf(x) : expf(x);
}
template <typename T>
__device__ __forceinline__ float quotient_for(float x, float y) {
  return sizeof(T) < sizeof(float) ? __fdividef(x, y) : x / y;
}

// kCount elements, accessed at once if they take at most 16 bytes, else 16 bytes at a time. They are stored as 32-bit
// words: given single elements, the compiler unpacks and repacks the words.
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

  // Element i must be zero before the call.
  __device__ __forceinline__ void set(int i, T element) {
    uint32_t bits = 0;
    memcpy(&bits, &element, sizeof element);
    words[i / kPerWord] |= bits << (i % kPerWord * 8 * int(sizeof(T)));
  }
};

// Elements of one 16-byte access.
template <typename T>
constexpr int kWidth = 16 / int(sizeof(T));

// Converts a pack to fp32. bf16 is the upper half of fp32 and takes one instruction per element.
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

// Rounds fp32 values to a pack; bf16 takes one instruction per two elements.
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

// Whether rows of `width` elements start and end on pack boundaries in each of these tensors; null pointers are
// ignored.
template <typename T>
bool are_whole(int64_t width, std::initializer_list<const void*> tensors) {
  if (width % kWidth<T> != 0) return false;
  for (const void* tensor : tensors)
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return false;
  return true;
}

// Elements of the row's first pack that lie before the row: the pack starts at the 16-byte boundary at or below the
// row.
template <bool kWhole = false, typename T>
__device__ __forceinline__ int shift_of(const T* row) {
  return kWhole ? 0 : int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
}

// Whether elements first..first + kCount - 1 all lie in the row and are aligned for vectorized access.
template <int kCount, bool kWhole = false, typename T>
__device__ __forceinline__ bool is_whole(const T* row, int first, int count) {
  return kWhole ? first < count
                : first >= 0 && first <= count - kCount &&
                      reinterpret_cast<uintptr_t>(row + first) % alignof(Pack<T, kCount>) == 0;
}

// Whether `column`, an element of a pack that overlaps the row, lies in the row.
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

// Loads elements first..first + kCount - 1 of a row of `count` elements; 0 outside the row.
template <int kCount, bool kWhole = false, typename T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* row, int first, int count) {
  if (is_whole<kCount, kWhole>(row, first, count)) return *reinterpret_cast<const Pack<T, kCount>*>(row + first);
  return kWhole ? Pack<T, kCount>{} : load_elements<kCount>(row, first, count);
}

// Loads the packs at first, first + step, ...; all vectorized loads are issued before any result is used. Packs that do
// not overlap elements begin..end - 1 are not read and are 0.
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

// Stores those of elements first..first + kCount - 1 that lie in the row.
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

// fmaxf ignores a NaN operand; kernels propagate NaNs through the sum that follows.
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

// Reduction over the kThreads threads of a row. All of them get the result, which is bitwise reproducible. One barrier
// per call: calls alternate between two shared-memory buffers, and no thread reaches the call after the next before all
// have read the results of this one.
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

  // Two reductions with one barrier.
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

// Threads per block if a row takes kThreads threads.
template <int kThreads>
constexpr int kBlock = kThreads > 128 ? kThreads : 128;

// One block's share of flat memory: a chunk that starts at a 16-byte boundary of `anchor`.
struct Share {
  int64_t lower;  // first element of the share; the other fields are relative to it
  int first;      // start of the chunk; negative if the memory starts past a 16-byte boundary
  int count;      // elements up to the end of the memory, limited to what the share can reach
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

// Number of blocks for `count` elements, whatever their alignment.
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

// Calls body with a null pointer to the element type with code `dtype`.
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

// Calls body with the smallest supported number of threads that holds a row of `columns` at `values` elements per
// thread; if none does, with kMost, and the row is then read in chunks.
template <int kMost = 1024, typename Body>
int with_threads(int64_t columns, int64_t values, Body body) {
  if (columns <= 32 * values) return body(Constant<32>{});
  if (columns <= 128 * values) return body(Constant<128>{});
  if (columns <= 256 * values) return body(Constant<256>{});
  if (kMost == 512 || columns <= 512 * values) return body(Constant<512>{});
  return body(Constant<kMost>{});
}

}  // namespace megads::cuda
