// Quantization to FP8 with power-of-two scales (megads/ops/float8.py); see launchers.h.
//
// Magnitudes are the bits of fp32 numbers without their sign, compared as integers: a maximum does not depend on its
// order, and keeps infinities and NaNs, which make the scale and all values of their group NaN. Scaling is exact, and a
// scaled value is at most the format's largest number: the conversion is the only rounding.
#include <cuda_fp8.h>

#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kPacks = 4;         // packs of a thread when magnitudes are read
constexpr int kRoundedPacks = 2;  // packs of a thread when values are rounded
constexpr int64_t kEnoughBlocks = 1024, kMostColumnParts = 64;
constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinityBits = 0x7f800000u, kNaNBits = 0x7fc00000u;

struct E4M3 {
  static constexpr int kTop = 8;  // exponent of the largest number, 1.75 * 2^8
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E4M3;
};
struct E5M2 {
  static constexpr int kTop = 15;  // 1.75 * 2^15
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E5M2;
};

__device__ __forceinline__ uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }

// Magnitude of element i of a pack of fp32 or bf16.
template <typename T, int kCount>
__device__ __forceinline__ uint32_t magnitude_of(const Pack<T, kCount>& pack, int i) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return pack.words[i] & kMagnitude;
  } else {
    return (i % 2 ? pack.words[i / 2] : pack.words[i / 2] << 16) & (kMagnitude & 0xffff0000u);
  }
}

template <typename T, int kCount, int kOfThread>
__device__ __forceinline__ uint32_t largest_of(const Pack<T, kCount> (&packs)[kOfThread], uint32_t largest) {
#pragma unroll
  for (int p = 0; p < kOfThread; ++p)
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = larger(largest, magnitude_of(packs[p], i));
  return largest;
}

// Maximum over the kOfRow threads of a row, for all of them. At most once in a kernel, as it uses shared memory.
template <int kOfRow>
__device__ __forceinline__ uint32_t largest_of_row(uint32_t largest) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  if constexpr (kOfRow > kWarp) {
    uint32_t* place = reinterpret_cast<uint32_t*>(megads_shared);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (lane == 0) place[warp] = largest;
    __syncthreads();
    largest = lane < kOfRow / kWarp ? place[lane] : 0;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
      largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  return largest;
}

template <int kOfRow>
constexpr int kSharedBytes = kOfRow > kWarp ? kOfRow / kWarp * int(sizeof(uint32_t)) : 0;

// A power of two by its biased exponent.
__device__ __forceinline__ float power_of(int exponent) { return __uint_as_float(uint32_t(exponent) << 23); }

// What values are multiplied by, and its inverse.
struct Scale {
  float scale, inverse;
};

// Scale of a group with this largest magnitude; kCarry raises the exponent of significands above 1.75. Inverse scales
// are at least 2^-100, so that the scale is finite and quantized values are normal bf16 numbers.
template <typename Format>
__device__ __forceinline__ Scale scale_of(uint32_t bits) {
  constexpr uint32_t kCarry = 0x1fffffu;
  constexpr int kSmallest = 27;
  const float nan = __uint_as_float(kNaNBits);
  if (bits >= kInfinityBits) return {nan, nan};
  const int found = int((bits + kCarry) >> 23) - Format::kTop, exponent = found > kSmallest ? found : kSmallest;
  return {power_of(254 - exponent), power_of(exponent)};
}

// Two values in the lower 16 bits, the first in the lowest 8.
template <typename Format>
__device__ __forceinline__ uint32_t rounded(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, Format::kKind);
}

template <typename Format, typename T, int kCount>
__device__ __forceinline__ Pack<uint8_t, kCount> rounded_pack(const Pack<T, kCount>& pack, float scale) {
  float values[kCount];
  widen_pack(pack, values);
  Pack<uint8_t, kCount> found{};
#pragma unroll
  for (int i = 0; i < kCount; i += 2)
    found.words[i / 4] |= rounded<Format>(values[i] * scale, values[i + 1] * scale) << (i % 4 * 8);
  return found;
}

// Stores those of elements first..first + kCount - 1 that lie in the row.
template <bool kWhole, int kCount>
__device__ __forceinline__ void store_rounded(uint8_t* row, int first, int count, const Pack<uint8_t, kCount>& pack) {
  if (is_whole<kCount, kWhole>(row, first, count)) {
    *reinterpret_cast<Pack<uint8_t, kCount>*>(row + first) = pack;
  } else if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (first + i >= 0 && first + i < count) row[first + i] = pack[i];
  }
}

// kOfGroup threads read chunks part, part + gridDim.y, ... of a group; found is [groups, gridDim.y].
template <typename T, int kOfGroup, bool kWhole>
__global__ void __launch_bounds__(kBlock<kOfGroup>)
    magnitudes(int64_t groups, int64_t size, const T* __restrict__ x, uint32_t* __restrict__ found) {
  constexpr int kStep = kOfGroup * kWidth<T>, kChunk = kStep * kPacks;
  const int64_t group = int64_t(blockIdx.x) * (kBlock<kOfGroup> / kOfGroup) + threadIdx.x / kOfGroup;
  if (group >= groups) return;  // a whole warp: larger groups have a block each
  const T* values = x + group * size;
  const int shift = shift_of<kWhole>(values), place = int(threadIdx.x) % kOfGroup * kWidth<T>;
  uint32_t largest = 0;
  for (int64_t origin = int64_t(blockIdx.y) * kChunk; origin < size + shift; origin += int64_t(gridDim.y) * kChunk) {
    const int64_t shifted = origin - shift, lower = shifted > 0 ? shifted : 0;
    const int64_t left = size - lower, reach = int64_t(kChunk) + 16;
    const int count = int(left < reach ? left : reach);
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs<kWhole>(packs, values + lower, int(shifted - lower) + place, kStep, count, 0, count);
    largest = largest_of(packs, largest);
  }
  largest = largest_of_row<kOfGroup>(largest);
  if (threadIdx.x % kOfGroup == 0) found[group * gridDim.y + blockIdx.y] = largest;
}

// Block g: the maximum of row g of found, [groups, parts].
__global__ void __launch_bounds__(kThreads)
    largest_of_parts(const uint32_t* __restrict__ found, int parts, uint32_t* __restrict__ bits) {
  const uint32_t* of_group = found + int64_t(blockIdx.x) * parts;
  uint32_t largest = 0;
  for (int part = int(threadIdx.x); part < parts; part += kThreads) largest = larger(largest, of_group[part]);
  largest = largest_of_row<kThreads>(largest);
  if (threadIdx.x == 0) bits[blockIdx.x] = largest;
}

// A warp reads 32 packs of a row. Block (s, p) reads strip s of rows 8 * p + warp, 8 * (p + gridDim.y) + warp, ...
// found is [gridDim.y, columns].
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    column_magnitudes(int rows, int columns, const T* __restrict__ x, uint32_t* __restrict__ found) {
  constexpr int kStrip = kWarp * kWidth<T>;
  uint32_t* shared = reinterpret_cast<uint32_t*>(megads_shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t strip = int64_t(blockIdx.x) * kStrip;
  uint32_t largest[kWidth<T>] = {};
  for (int64_t row = int64_t(blockIdx.y) * kWarps + warp; row < rows; row += int64_t(gridDim.y) * kWarps) {
    const auto pack = load_pack<kWidth<T>, kWhole>(x + row * columns, int(strip) + lane * kWidth<T>, columns);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) largest[i] = larger(largest[i], magnitude_of(pack, i));
  }
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) shared[warp * kStrip + lane * kWidth<T> + i] = largest[i];
  __syncthreads();
  if (int(threadIdx.x) >= kStrip || strip + threadIdx.x >= columns) return;
  uint32_t of_column = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) of_column = larger(of_column, shared[other * kStrip + threadIdx.x]);
  found[int64_t(blockIdx.y) * columns + strip + threadIdx.x] = of_column;
}

// The maximum of each column of found, [parts, columns].
__global__ void __launch_bounds__(kThreads) largest_of_column(const uint32_t* __restrict__ found, int parts,
                                                              int columns, uint32_t* __restrict__ bits) {
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  uint32_t largest = 0;
  for (int part = 0; part < parts; ++part) largest = larger(largest, found[int64_t(part) * columns + column]);
  bits[column] = largest;
}

// A block rounds one chunk of a group; each group has `chunks`.
template <typename T, typename Format, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    quantize(int64_t size, unsigned chunks, const T* __restrict__ x, const uint32_t* __restrict__ bits,
             uint8_t* __restrict__ values, float* __restrict__ inverse) {
  constexpr int kStep = kThreads * kWidth<T>, kChunk = kStep * kRoundedPacks;
  const int64_t group = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const T* from = x + group * size;
  const int64_t shifted = chunk * kChunk - shift_of<kWhole>(from), lower = shifted > 0 ? shifted : 0;
  const int64_t left = size - lower, reach = int64_t(kChunk) + 16;
  const int count = int(left < reach ? left : reach), first = int(shifted - lower) + int(threadIdx.x) * kWidth<T>;
  Pack<T, kWidth<T>> packs[kRoundedPacks];
  load_packs<kWhole>(packs, from + lower, first, kStep, count, 0, count);
  const Scale of_group = scale_of<Format>(bits[group]);
#pragma unroll
  for (int p = 0; p < kRoundedPacks; ++p)
    if (first + p * kStep < count)
      store_rounded<kWhole>(values + group * size + lower, first + p * kStep, count,
                            rounded_pack<Format>(packs[p], of_group.scale));
  if (chunk == 0 && threadIdx.x == 0) inverse[group] = of_group.inverse;
}

// kOfRow threads find the largest magnitude of a row and round it. A row that they do not hold at once is read again,
// from the cache.
template <typename T, typename Format, int kOfRow, bool kWhole>
__global__ void __launch_bounds__(kBlock<kOfRow>) quantize_rows(int64_t rows, int width, const T* __restrict__ x,
                                                               uint8_t* __restrict__ values,
                                                               float* __restrict__ inverse) {
  constexpr int kOfThread = 16 / kWidth<T>, kStep = kOfRow * kWidth<T>, kChunk = kStep * kOfThread;
  const int64_t row = int64_t(blockIdx.x) * (kBlock<kOfRow> / kOfRow) + threadIdx.x / kOfRow;
  if (row >= rows) return;  // a whole warp: longer rows have a block each
  const T* from = x + row * width;
  const int first = int(threadIdx.x) % kOfRow * kWidth<T> - shift_of<kWhole>(from);
  const int end = width + shift_of<kWhole>(from);
  Pack<T, kWidth<T>> packs[kOfThread];
  uint32_t largest = 0;
  for (int origin = 0; origin < end; origin += kChunk) {
    load_packs<kWhole>(packs, from, origin + first, kStep, width, 0, width);
    largest = largest_of(packs, largest);
  }
  const Scale of_row = scale_of<Format>(largest_of_row<kOfRow>(largest));
  for (int origin = 0; origin < end; origin += kChunk) {
    if (end > kChunk) load_packs<kWhole>(packs, from, origin + first, kStep, width, 0, width);
#pragma unroll
    for (int p = 0; p < kOfThread; ++p) {
      const int at = origin + first + p * kStep;
      const auto pack = rounded_pack<Format>(packs[p], of_row.scale);
      if (at < width) store_rounded<kWhole>(values + row * width, at, width, pack);
    }
  }
  if (threadIdx.x % kOfRow == 0) inverse[row] = of_row.inverse;
}

struct Matrix {
  int rows, columns;
  int row_groups, column_groups;  // 1: one group; else as many as rows or columns
};

constexpr int kTile = 64, kTileStride = kTile + 4;  // bytes; the padding divides banks among the columns

// A block rounds a tile twice: with scales of rows to `values`, and with scales of columns to its transpose.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    quantize_both(Matrix shape, const T* __restrict__ x, const uint32_t* __restrict__ row_bits,
                  const uint32_t* __restrict__ column_bits, uint8_t* __restrict__ values,
                  uint8_t* __restrict__ transposed, float* __restrict__ row_inverse,
                  float* __restrict__ column_inverse) {
  constexpr int kPacksOfRow = kTile / kWidth<T>, kStored = 8;
  const int first_row = int(blockIdx.y) * kTile, first_column = int(blockIdx.x) * kTile;
  for (int item = int(threadIdx.x); item < kTile * kPacksOfRow; item += kThreads) {
    const int down = item / kPacksOfRow, along = item % kPacksOfRow * kWidth<T>;
    const int row = first_row + down, column = first_column + along;
    if (row >= shape.rows || column >= shape.columns) continue;
    const auto pack = load_pack<kWidth<T>, kWhole>(x + int64_t(row) * shape.columns, column, shape.columns);
    const float scale = scale_of<E4M3>(row_bits[shape.row_groups > 1 ? row : 0]).scale;
    uint8_t* to = values + int64_t(row) * shape.columns;
    store_rounded<kWhole>(to, column, shape.columns, rounded_pack<E4M3>(pack, scale));
    float given[kWidth<T>];
    widen_pack(pack, given);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      if (!is_inside<kWhole>(column + i, shape.columns)) continue;
      const float of_column = scale_of<E4M3>(column_bits[shape.column_groups > 1 ? column + i : 0]).scale;
      megads_shared[(along + i) * kTileStride + down] = uint8_t(rounded<E4M3>(given[i] * of_column, 0.0f));
    }
  }
  __syncthreads();
  for (int item = int(threadIdx.x); item < kTile * (kTile / kStored); item += kThreads) {
    const int along = item / (kTile / kStored), down = item % (kTile / kStored) * kStored;
    const int column = first_column + along;
    if (column >= shape.columns || first_row + down >= shape.rows) continue;
    const auto* words = reinterpret_cast<const uint32_t*>(megads_shared + along * kTileStride + down);
    Pack<uint8_t, kStored> pack;
    pack.words[0] = words[0];
    pack.words[1] = words[1];
    store_rounded<kWhole>(transposed + int64_t(column) * shape.rows, first_row + down, shape.rows, pack);
  }
  const int row = first_row + int(threadIdx.x), column = first_column + int(threadIdx.x);
  if (threadIdx.x >= kTile) return;
  if (blockIdx.x == 0 && row < shape.row_groups) row_inverse[row] = scale_of<E4M3>(row_bits[row]).inverse;
  if (blockIdx.y == 0 && column < shape.column_groups)
    column_inverse[column] = scale_of<E4M3>(column_bits[column]).inverse;
}

// Calls body with a null pointer to the element type with code `dtype`: fp16 cannot hold all scales.
template <typename Body>
int with_wide_dtype(int64_t dtype, Body body) {
  switch (dtype) {
    case MEGADS_FP32: return body(static_cast<float*>(nullptr));
    case MEGADS_BF16: return body(static_cast<__nv_bfloat16*>(nullptr));
  }
  return int(cudaErrorInvalidValue);
}

template <typename Body>
int with_format(int64_t format, Body body) {
  switch (format) {
    case MEGADS_E4M3: return body(E4M3{});
    case MEGADS_E5M2: return body(E5M2{});
  }
  return int(cudaErrorInvalidValue);
}

constexpr int64_t kLongest = (int64_t(1) << 31) - (1 << 16);

template <typename T, int kOfGroup, bool kWhole>
int launch_magnitudes(int64_t groups, int64_t size, int64_t parts, const void* x, void* found, int64_t stream) {
  const dim3 grid(unsigned(blocks_for(groups, kBlock<kOfGroup> / kOfGroup)), unsigned(parts));
  return launch(magnitudes<T, kOfGroup, kWhole>, grid, kBlock<kOfGroup>, kSharedBytes<kOfGroup>, stream, groups, size,
                static_cast<const T*>(x), static_cast<uint32_t*>(found));
}

template <typename T, typename Format, int kOfRow, bool kWhole>
int launch_rows(int64_t rows, int64_t width, const void* x, void* values, float* inverse, int64_t stream) {
  const dim3 grid(unsigned(blocks_for(rows, kBlock<kOfRow> / kOfRow)));
  return launch(quantize_rows<T, Format, kOfRow, kWhole>, grid, kBlock<kOfRow>, kSharedBytes<kOfRow>, stream, rows,
                int(width), static_cast<const T*>(x), static_cast<uint8_t*>(values), inverse);
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int64_t megads_cuda_float8_parts(int64_t groups, int64_t size) {
  constexpr int64_t kChunk = kThreads * 8 * kPacks;
  const int64_t chunks = blocks_for(size, kChunk), most = groups > 0 ? blocks_for(kEnoughBlocks, groups) : 1;
  return chunks < 1 ? 1 : chunks < most ? chunks : most;
}

extern "C" int megads_cuda_float8_magnitudes(int64_t dtype, int64_t groups, int64_t size, const void* x, void* partial,
                                             int32_t* bits, int64_t stream) {
  if (groups == 0) return 0;
  if (groups > kMostBlocks) return int(MEGADS_TOO_LARGE);
  const int64_t parts = megads_cuda_float8_parts(groups, size);
  void* found = parts > 1 ? partial : bits;
  const int error = with_wide_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const bool whole = are_whole<T>(size, {x});
    if (whole && size <= kWarp * kWidth<T> * kPacks)
      return launch_magnitudes<T, kWarp, true>(groups, size, parts, x, found, stream);
    return whole ? launch_magnitudes<T, kThreads, true>(groups, size, parts, x, found, stream)
                 : launch_magnitudes<T, kThreads, false>(groups, size, parts, x, found, stream);
  });
  if (error || parts == 1) return error;
  return launch(largest_of_parts, dim3(unsigned(groups)), kThreads, kSharedBytes<kThreads>, stream,
                static_cast<const uint32_t*>(partial), int(parts), reinterpret_cast<uint32_t*>(bits));
}

extern "C" int64_t megads_cuda_float8_column_parts(int64_t rows) {
  const int64_t parts = blocks_for(rows, kWarps * 8);
  return parts < 1 ? 1 : parts < kMostColumnParts ? parts : kMostColumnParts;
}

extern "C" int megads_cuda_float8_column_magnitudes(int64_t dtype, int64_t rows, int64_t columns, const void* x,
                                                    void* partial, int32_t* bits, int64_t stream) {
  if (columns == 0) return 0;
  if (rows > kLongest || columns > kLongest) return int(MEGADS_TOO_LARGE);
  const int64_t parts = megads_cuda_float8_column_parts(rows);
  const int error = with_wide_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    constexpr int kStrip = kWarp * kWidth<T>;
    const bool whole = are_whole<T>(columns, {x});
    const dim3 grid(unsigned(blocks_for(columns, kStrip)), unsigned(parts));
    return launch(whole ? column_magnitudes<T, true> : column_magnitudes<T, false>, grid, kThreads,
                  kWarps * kStrip * int(sizeof(uint32_t)), stream, int(rows), int(columns), static_cast<const T*>(x),
                  static_cast<uint32_t*>(parts > 1 ? partial : bits));
  });
  if (error || parts == 1) return error;
  return launch(largest_of_column, dim3(unsigned(blocks_for(columns, kThreads))), kThreads, 0, stream,
                static_cast<const uint32_t*>(partial), int(parts), int(columns), reinterpret_cast<uint32_t*>(bits));
}

extern "C" int megads_cuda_float8_quantize(int64_t dtype, int64_t format, int64_t groups, int64_t size, const void* x,
                                           const int32_t* bits, void* values, float* inverse, int64_t stream) {
  if (groups == 0) return 0;
  return with_wide_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const bool whole = are_whole<T>(size, {x, values});
    constexpr int64_t kChunk = kThreads * kWidth<T> * kRoundedPacks;
    const int64_t chunks = blocks_for(size + (whole ? 0 : kWidth<T> - 1) + (size == 0), kChunk);
    if (groups > kMostBlocks / chunks) return int(MEGADS_TOO_LARGE);
    return with_format(format, [&](auto of) {
      using Format = decltype(of);
      return launch(whole ? quantize<T, Format, true> : quantize<T, Format, false>, dim3(unsigned(groups * chunks)),
                    kThreads, 0, stream, size, unsigned(chunks), static_cast<const T*>(x),
                    reinterpret_cast<const uint32_t*>(bits), static_cast<uint8_t*>(values), inverse);
    });
  });
}

extern "C" int megads_cuda_float8_quantize_rows(int64_t dtype, int64_t format, int64_t rows, int64_t width,
                                                const void* x, void* values, float* inverse, int64_t stream) {
  if (rows == 0) return 0;
  if (rows > kMostBlocks || width > kLongest) return int(MEGADS_TOO_LARGE);
  return with_wide_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    return with_format(format, [&](auto of) {
      using Format = decltype(of);
      if (!are_whole<T>(width, {x, values}))
        return launch_rows<T, Format, 128, false>(rows, width, x, values, inverse, stream);
      if (width <= 32 * 16) return launch_rows<T, Format, 32, true>(rows, width, x, values, inverse, stream);
      if (width <= 128 * 16) return launch_rows<T, Format, 128, true>(rows, width, x, values, inverse, stream);
      return launch_rows<T, Format, 512, true>(rows, width, x, values, inverse, stream);
    });
  });
}

extern "C" int megads_cuda_float8_quantize_both(int64_t dtype, int64_t rows, int64_t columns, int64_t row_groups,
                                                int64_t column_groups, const void* x, const int32_t* row_bits,
                                                const int32_t* column_bits, void* values, void* transposed,
                                                float* row_inverse, float* column_inverse, int64_t stream) {
  if (rows == 0 || columns == 0) return 0;
  if ((row_groups != 1 && row_groups != rows) || (column_groups != 1 && column_groups != columns))
    return int(cudaErrorInvalidValue);
  if (blocks_for(rows, kTile) > 65535 || columns > kLongest) return int(MEGADS_TOO_LARGE);
  const Matrix shape{int(rows), int(columns), int(row_groups), int(column_groups)};
  return with_wide_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const bool whole = are_whole<T>(columns, {x, values, transposed}) && rows % 8 == 0;
    const dim3 grid(unsigned(blocks_for(columns, kTile)), unsigned(blocks_for(rows, kTile)));
    return launch(whole ? quantize_both<T, true> : quantize_both<T, false>, grid, kThreads, kTile * kTileStride, stream,
                  shape, static_cast<const T*>(x), reinterpret_cast<const uint32_t*>(row_bits),
                  reinterpret_cast<const uint32_t*>(column_bits), static_cast<uint8_t*>(values),
                  static_cast<uint8_t*>(transposed), row_inverse, column_inverse);
  });
}
