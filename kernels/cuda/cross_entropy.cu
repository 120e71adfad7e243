// Cross entropy over a part of the vocabulary; see launchers.h.
//
// Forward: a block reads a row once. Every thread keeps the largest logit that it has met and the sum of exponentials
// above it, and corrects the sum when a larger one comes (Milakov and Gimelshein 2018): elements * size bytes.
// Backward: a block computes a chunk of a row from logits and row statistics: 2 * elements * size bytes. The logits are
// never there in fp32.
#include "device.cuh"

namespace megads::cuda {
namespace {

constexpr int kPacks = 2;
constexpr int kForwardThreads = 512, kBackwardThreads = 256;

struct Vocabulary {
  int columns, valid;
  int64_t start;
};

// Column of a label, or -1 where it is not among those that count.
__device__ __forceinline__ int column_of(int64_t label, const Vocabulary& part) {
  const int64_t column = label - part.start;
  return column >= 0 && column < part.valid ? int(column) : -1;
}

template <typename T>
__global__ void __launch_bounds__(kForwardThreads)
    cross_entropy_forward(Vocabulary part, const T* __restrict__ logits, const int64_t* __restrict__ labels,
                          float* __restrict__ statistics) {
  constexpr int kStep = kForwardThreads * kWidth<T>;
  const T* row = logits + int64_t(blockIdx.x) * part.columns;
  float largest = -kInfinity, total = 0.0f;
  for (int at = int(threadIdx.x) * kWidth<T> - shift_of(row); at < part.valid; at += kPacks * kStep) {
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs(packs, row, at, kStep, part.columns, 0, part.valid);
    float values[kPacks][kWidth<T>];
    float now = largest;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const int column = at + p * kStep + i;
        values[p][i] = column >= 0 && column < part.valid ? widen(packs[p].elements[i]) : -kInfinity;
        now = fmaxf(now, values[p][i]);
      }
    if (now != largest) total *= expf(largest - now);
    largest = now;
    // Nothing but -inf so far adds nothing; a NaN must come through.
    const float base = largest == -kInfinity ? 0.0f : largest;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) total += expf(values[p][i] - base);
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

template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    cross_entropy_backward(Vocabulary part, const T* logits, const int64_t* __restrict__ labels,
                           const float* __restrict__ largest, const float* __restrict__ total,
                           const float* __restrict__ grad, T* grad_logits) {
  constexpr int kStep = kBackwardThreads * kWidth<T>;
  const T* row = logits + int64_t(blockIdx.x) * part.columns;
  T* to = grad_logits + int64_t(blockIdx.x) * part.columns;
  const int first = int(blockIdx.y * kPacks * kBackwardThreads + threadIdx.x) * kWidth<T> - shift_of(row);
  const float peak = largest[blockIdx.x], sum = total[blockIdx.x], factor = grad[blockIdx.x];
  const int label = column_of(labels[blockIdx.x], part);
  Pack<T, kWidth<T>> packs[kPacks];
  load_packs(packs, row, first, kStep, part.columns, 0, part.valid);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = first + p * kStep;
    if (at >= part.columns) continue;
    float values[kWidth<T>];
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      const float probability = expf(widen(packs[p].elements[i]) - peak) / sum;
      values[i] = at + i < part.valid ? (probability - (at + i == label ? 1.0f : 0.0f)) * factor : 0.0f;
    }
    store_pack(to, at, part.columns, values);
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
    return launch(cross_entropy_forward<T>, dim3(unsigned(rows)), kForwardThreads,
                  RowReduction<kForwardThreads>::kSharedBytes, stream, Vocabulary{int(columns), int(valid), start},
                  static_cast<const T*>(logits), labels, statistics);
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
    return launch(cross_entropy_backward<T>, dim3(unsigned(rows), unsigned(shares_for(columns, chunk))),
                  kBackwardThreads, 0, stream, Vocabulary{int(columns), int(valid), start},
                  static_cast<const T*>(logits), labels, largest, total, grad, static_cast<T*>(grad_logits));
  });
}
