// Cross entropy over a vocabulary shard; see launchers.h.
//
// Forward: one block per row reads the row once with an online softmax (Milakov and Gimelshein 2018): each thread keeps
// a running maximum and a running sum of exponentials, which it rescales when the maximum grows. Traffic:
// elements * size bytes.
//
// Backward: a block computes a chunk of a row from the logits and row statistics. Traffic: 2 * elements * size bytes.
// The logits are never materialized in fp32.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kPacks = 2;
constexpr int kForwardThreads = 512, kBackwardThreads = 256;

struct Vocabulary {
  int columns, valid;
  int64_t start;
};

// Column of a label, or -1 if the label is outside the valid columns of this shard.
__device__ __forceinline__ int column_of(int64_t label, const Vocabulary& part) {
  const int64_t column = label - part.start;
  return column >= 0 && column < part.valid ? int(column) : -1;
}

// Sets elements of a pack at column `at` that are outside the valid columns to `other`.
template <bool kWhole, int kCount>
__device__ __forceinline__ void replace_others(float (&values)[kCount], int at, int valid, float other) {
  if (at + kCount <= valid && (kWhole || at >= 0)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (at + i < 0 || at + i >= valid) values[i] = other;
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kForwardThreads)
    cross_entropy_forward(Vocabulary part, const T* __restrict__ logits, const int64_t* __restrict__ labels,
                          float* __restrict__ statistics) {
  constexpr int kStep = kForwardThreads * kWidth<T>;
  const T* row = logits + int64_t(blockIdx.x) * part.columns;
  float largest = -kInfinity, total = 0.0f;
  for (int at = int(threadIdx.x) * kWidth<T> - shift_of<kWhole>(row); at < part.valid; at += kPacks * kStep) {
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs<kWhole>(packs, row, at, kStep, part.columns, 0, part.valid);
    float values[kPacks][kWidth<T>];
    float now = largest;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      widen_pack(packs[p], values[p]);
      replace_others<kWhole>(values[p], at + p * kStep, part.valid, -kInfinity);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) now = fmaxf(now, values[p][i]);
    }
    if (now != largest) total *= exp_for<T>(largest - now);
    largest = now;
    // If all logits so far are -inf, they add 0; a NaN must propagate.
    const float base = largest == -kInfinity ? 0.0f : largest;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) total += exp_for<T>(values[p][i] - base);
  }
  RowReduction<kForwardThreads> over_row;
  const float peak = over_row.template operator()<Largest>(largest);
  if (largest != peak) total *= expf(largest - peak);
  total = over_row.template operator()<Sum>(total);
  if (threadIdx.x != 0) return;
  const int column = column_of(labels[blockIdx.x], part);
  float* to = statistics + 3 * int64_t(blockIdx.x);
  to[0] = peak;
  to[1] = total;
  to[2] = column < 0 ? 0.0f : widen(row[column]);
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kBackwardThreads)
    cross_entropy_backward(Vocabulary part, const T* logits, const int64_t* __restrict__ labels,
                           const float* __restrict__ largest, const float* __restrict__ total,
                           const float* __restrict__ grad, T* grad_logits) {
  constexpr int kStep = kBackwardThreads * kWidth<T>;
  const T* row = logits + int64_t(blockIdx.x) * part.columns;
  T* to = grad_logits + int64_t(blockIdx.x) * part.columns;
  const int first = int(blockIdx.y * kPacks * kBackwardThreads + threadIdx.x) * kWidth<T> - shift_of<kWhole>(row);
  const float peak = largest[blockIdx.x], factor = grad[blockIdx.x], share = factor / total[blockIdx.x];
  const int label = column_of(labels[blockIdx.x], part);
  Pack<T, kWidth<T>> packs[kPacks];
  load_packs<kWhole>(packs, row, first, kStep, part.columns, 0, part.valid);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = first + p * kStep;
    if (at >= part.columns) continue;
    float values[kWidth<T>];
    widen_pack(packs[p], values);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) values[i] = exp_for<T>(values[i] - peak) * share;
    if (label >= at && label < at + kWidth<T>) {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i)
        if (at + i == label) values[i] -= factor;
    }
    replace_others<kWhole>(values, at, part.valid, 0.0f);
    store_pack<kWhole>(to, at, part.columns, values);
  }
}

bool fits(int64_t rows, int64_t columns) { return rows <= kMostBlocks && columns <= 65535 * 1024; }

bool is_part(int64_t valid, int64_t columns) { return valid >= 0 && valid <= columns; }

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_cross_entropy_forward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid,
                                                 int64_t start, const void* logits, const int64_t* labels,
                                                 float* statistics, int64_t stream) {
  if (rows == 0) return 0;
  if (!fits(rows, columns)) return int(MEGADS_TOO_LARGE);
  if (!is_part(valid, columns)) return int(cudaErrorInvalidValue);
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const bool whole = are_whole<T>(columns, {logits});
    return launch(whole ? cross_entropy_forward<T, true> : cross_entropy_forward<T, false>, dim3(unsigned(rows)),
                  kForwardThreads, RowReduction<kForwardThreads>::kSharedBytes, stream,
                  Vocabulary{int(columns), int(valid), start}, static_cast<const T*>(logits), labels, statistics);
  });
}

extern "C" int megads_cuda_cross_entropy_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid,
                                                  int64_t start, const void* logits, const int64_t* labels,
                                                  const float* largest, const float* total, const float* grad,
                                                  void* grad_logits, int64_t stream) {
  if (rows == 0 || columns == 0) return 0;
  if (!fits(rows, columns)) return int(MEGADS_TOO_LARGE);
  if (!is_part(valid, columns)) return int(cudaErrorInvalidValue);
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t chunk = kBackwardThreads * kPacks * kWidth<T>;
    const bool whole = are_whole<T>(columns, {logits, grad_logits});
    return launch(whole ? cross_entropy_backward<T, true> : cross_entropy_backward<T, false>,
                  dim3(unsigned(rows), unsigned(shares_for(columns, chunk))), kBackwardThreads, 0, stream,
                  Vocabulary{int(columns), int(valid), start}, static_cast<const T*>(logits), labels, largest, total,
                  grad, static_cast<T*>(grad_logits));
  });
}
