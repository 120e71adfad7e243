// Stands in for CUDA's header of this name when a C++ compiler for CPUs translates kernels/cuda: the same source then
// runs lane by lane. Every thread of a block is a fiber; barriers and exchanges between lanes are where it may be left.
// One block runs at a time, so that what is global here belongs to the block that runs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
  unsigned x, y, z;
};

struct float2 {
  float x, y;
};

inline float2 make_float2(float x, float y) { return {x, y}; }

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

typedef struct CUstream_st* cudaStream_t;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace shim {

using Where = std::source_location;

// Runs `thread` once for every thread of every block.
cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

const char* message();

cudaError_t ask_for_shared(int bytes);

void barrier(unsigned line);

// Waits until all lanes of `mask` are here with values of theirs, and returns that of lane `source`.
uint64_t exchange(unsigned mask, uint64_t value, unsigned source, unsigned line);

// The lane of the thread that runs.
unsigned lane();

template <typename T>
T from_lane(unsigned mask, T value, unsigned source, unsigned line) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace shim

inline void __syncthreads(shim::Where where = shim::Where::current()) { shim::barrier(where.line()); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32, shim::Where where = shim::Where::current()) {
  return shim::from_lane(mask, value, shim::lane() ^ unsigned(distance), where.line());
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int = 32, shim::Where where = shim::Where::current()) {
  return shim::from_lane(mask, value, unsigned(source), where.line());
}

inline void __syncwarp(unsigned mask = 0xffffffffu, shim::Where where = shim::Where::current()) {
  shim::from_lane(mask, 0, shim::lane(), where.line());
}

// Of a kernel, for all its launches; here for the next launch.
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return shim::ask_for_shared(bytes);
}

inline const char* cudaGetErrorString(cudaError_t) { return shim::message(); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> parameters(static_cast<Parameters>(arguments)...);
  return shim::run(*config, [&] { std::apply(kernel, parameters); });
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
