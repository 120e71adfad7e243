// Softmax of scaled attention scores with ALiBi, causal, document and key masks, and dropout; see launchers.h.
//
// A row of scores belongs to one query of one head. It is held in registers and read once: by a warp up to 1024 keys
// forward and 512 backward (four rows per block), by a block of 128 to 1024 threads, 16 elements each, up to 16384 keys
// (8192 with dropout). Longer rows, and unaligned ones (not kWhole, see device.cuh), are read in chunks, once per pass:
// three passes forward and two backward, all but the first mostly from the L2 cache.
//
// Packs without visible keys are neither read nor computed: half of all under a causal mask. Elements are checked
// against the mask only in packs on the boundary of the visible range, or in all of its packs with a `hidden` mask.
#include "philox.cuh"

namespace megads::cuda {
namespace {

struct MaskedSoftmax {
  uint32_t rows, heads, queries;
  int keys;
  float scale;
  const float* slopes;
  const int64_t* places;
  const int64_t* starts;
  const uint8_t* hidden;
  DropoutMask mask;
};

// Keys visible to one query, and their bias.
struct Sight {
  int begin, end;  // visible keys begin..end - 1
  float slope, place;
  const uint8_t* hidden;  // key mask of the query's sample, or null
};

__device__ __forceinline__ int within(int64_t key, int keys) { return int(key < 0 ? 0 : key > keys ? keys : key); }

__device__ __forceinline__ Sight sight_of(const MaskedSoftmax& shape, uint32_t row) {
  const uint32_t query = row % shape.queries, of_head = row / shape.queries;
  const uint32_t head = of_head % shape.heads, sample = of_head / shape.heads;
  const int64_t place = shape.places ? shape.places[query] : int64_t(query);
  const int64_t start = shape.starts ? shape.starts[int64_t(sample) * shape.queries + query] : 0;
  return {within(start, shape.keys), within(place + 1, shape.keys), shape.slopes ? shape.slopes[head] : 0.0f,
          float(place), shape.hidden ? shape.hidden + int64_t(sample) * shape.keys : nullptr};
}

__device__ __forceinline__ MaskRow mask_row(const MaskedSoftmax& shape, uint32_t row) {
  const uint32_t query = row % shape.queries, of_head = row / shape.queries;
  const int64_t place = shape.places ? shape.places[query] : int64_t(query);
  return MaskRow(shape.mask, of_head / shape.heads, of_head % shape.heads, place);
}

// Elements of a row per thread; more in the forward pass if a row takes one warp, which needs no barrier.
constexpr int kElements = 16, kElementsOfWarp = 32;

// Threads per row for unaligned rows (not kWhole) that are too long for a warp.
constexpr int kThreadsOfOthers = 256;

// Target number of resident blocks per multiprocessor, which limits the registers per thread.
template <typename T, int kThreads, bool kWhole, bool kBackward>
constexpr int kResident = !kWhole || kThreads == 1024 ? 1
                          : sizeof(T) < 4 && (kBackward || kThreads > kWarp) ? 1280 / kBlock<kThreads>
                                                                             : 768 / kBlock<kThreads>;

// Whether the pack at element `at` overlaps the visible range.
template <int kCount>
__device__ __forceinline__ bool sees(const Sight& sight, int at) {
  return at < sight.end && at + kCount > sight.begin;
}

// Whether all of it is visible.
template <int kCount>
__device__ __forceinline__ bool sees_all(const Sight& sight, int at) {
  return at >= sight.begin && at + kCount <= sight.end && !sight.hidden;
}

__device__ __forceinline__ bool is_seen(const Sight& sight, int key) {
  return key >= sight.begin && key < sight.end && !(sight.hidden && sight.hidden[key]);
}

// One thread's part of a row: pack p starts at element first + p * kStep.
template <typename T, int kThreads, bool kWhole>
struct Part {
  static constexpr int kPacks = (kThreads > kWarp ? kElements : kElementsOfWarp) / kWidth<T>;
  static constexpr int kStep = kThreads * kWidth<T>;
  static constexpr int kChunk = kStep * kPacks;

  float values[kPacks][kWidth<T>];

  // Loads biased scores, -inf for masked keys of packs with visible ones; returns the maximum of the scores and
  // `largest`.
  __device__ __forceinline__ float load_scores(const T* row, int first, int keys, float scale, const Sight& sight,
                                               float largest) {
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs<kWhole>(packs, row, first, kStep, keys, sight.begin, sight.end);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * kStep;
      widen_pack(packs[p], values[p]);
      if (!sees<kWidth<T>>(sight, at)) continue;
      const float away = float(at) - sight.place;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[p][i] = values[p][i] * scale + sight.slope * (away + float(i));
      if (!sees_all<kWidth<T>>(sight, at)) {
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i)
          if (!is_seen(sight, at + i)) values[p][i] = -kInfinity;
      }
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) largest = fmaxf(largest, values[p][i]);
    }
    return largest;
  }

  // Replaces the scores by exp(score - base), 0 in packs without visible keys, and returns their sum.
  __device__ __forceinline__ float exponentials(int first, const Sight& sight, float base) {
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!sees<kWidth<T>>(sight, first + p * kStep)) {
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) values[p][i] = 0.0f;
        continue;
      }
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        values[p][i] = exp_for<T>(values[p][i] - base);
        total += values[p][i];
      }
    }
    return total;
  }

  __device__ __forceinline__ void store(T* row, int first, int keys, float factor) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * kStep;
      if (at >= keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[p][i] *= factor;
      store_pack<kWhole>(row, at, keys, values[p]);
    }
  }

  // Applies dropout to the values just stored and stores the result.
  __device__ __forceinline__ void store_dropped(T* row, int first, int keys, const Sight& sight,
                                                const DropoutMask& mask, const MaskRow& drawn) {
    const uint32_t kept = drawn.draw_packs<kWidth<T>, kPacks>(mask, first, kStep, sight.begin, sight.end);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * kStep;
      if (at >= keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[p][i] *= kept >> (p * kWidth<T> + i) & 1 ? mask.scale : 0.0f;
      store_pack<kWhole>(row, at, keys, values[p]);
    }
  }
};

template <typename T, int kThreads, bool kWhole, bool kDropped>
__device__ __forceinline__ void forward_row(const MaskedSoftmax& shape, const T* __restrict__ scores,
                                            T* __restrict__ out, T* __restrict__ dropped) {
  constexpr int kRows = kBlock<kThreads> / kThreads;
  using RowPart = Part<T, kThreads, kWhole>;
  const uint32_t row = blockIdx.x * kRows + threadIdx.x / kThreads;
  if (kRows > 1 && row >= shape.rows) return;  // the whole warp exits, and no barrier follows
  const T* from = scores + int64_t(row) * shape.keys;
  T* to = out + int64_t(row) * shape.keys;
  const Sight sight = sight_of(shape, row);
  const int shift = shift_of<kWhole>(from), first = int(threadIdx.x % kThreads) * kWidth<T> - shift;
  const int chunks = (shape.keys + shift + RowPart::kChunk - 1) / RowPart::kChunk;
  RowReduction<kThreads> over_row;
  RowPart part;
  const auto load = [&](int at, float largest) {
    return part.load_scores(from, at, shape.keys, shape.scale, sight, largest);
  };

  float largest = -kInfinity;
  for (int chunk = 0; chunk < chunks; ++chunk) largest = load(first + chunk * RowPart::kChunk, largest);
  largest = over_row.template operator()<Largest>(largest);
  // If all scores are -inf, -inf - -inf would be NaN.
  const float base = largest == -kInfinity ? 0.0f : largest;
  float total = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = first + chunk * RowPart::kChunk;
    if (chunks > 1) load(at, 0.0f);
    total += part.exponentials(at, sight, base);
  }
  total = over_row.template operator()<Sum>(total);
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = first + chunk * RowPart::kChunk;
    if (chunks > 1) {
      load(at, 0.0f);
      part.exponentials(at, sight, base);
    }
    part.store(to, at, shape.keys, factor);
    if constexpr (kDropped)
      part.store_dropped(dropped + int64_t(row) * shape.keys, at, shape.keys, sight, shape.mask, mask_row(shape, row));
  }
}

// Gradients and probabilities are held in registers together: rows up to 16384 keys (8192 with dropout) are read once.
// With dropout `grad` is the gradient of `dropped`, which is recomputed; a bit of `kept` is set for each kept element.
template <typename T, int kThreads, bool kWhole, bool kDropped>
__device__ __forceinline__ void backward_row(const MaskedSoftmax& shape, const T* grad, const T* __restrict__ out,
                                             T* grad_scores, T* dropped) {
  constexpr int kPacks = kElements / kWidth<T>;
  constexpr int kRows = kBlock<kThreads> / kThreads;
  constexpr int kStep = kThreads * kWidth<T>;
  const uint32_t row = blockIdx.x * kRows + threadIdx.x / kThreads;
  if (kRows > 1 && row >= shape.rows) return;
  const int keys = shape.keys;
  const T* probabilities = out + int64_t(row) * keys;
  const T* grad_row = grad + int64_t(row) * keys;
  T* to = grad_scores + int64_t(row) * keys;
  const Sight sight = sight_of(shape, row);
  const int shift = shift_of<kWhole>(probabilities), first = int(threadIdx.x % kThreads) * kWidth<T> - shift;
  const int chunks = (keys + shift + kStep * kPacks - 1) / (kStep * kPacks);
  RowReduction<kThreads> over_row;
  Pack<T, kWidth<T>> p_packs[kPacks], g_packs[kPacks];
  uint32_t kept = ~0u;
  const auto load = [&](int at) {
    load_packs<kWhole>(p_packs, probabilities, at, kStep, keys, sight.begin, sight.end);
    load_packs<kWhole>(g_packs, grad_row, at, kStep, keys, sight.begin, sight.end);
    if constexpr (kDropped)
      kept = mask_row(shape, row).draw_packs<kWidth<T>, kPacks>(shape.mask, at, kStep, sight.begin, sight.end);
  };
  // Values at masked keys are undefined and may be NaN.
  const auto hide = [&](int at, float(&values)[kWidth<T>]) {
    if (at >= sight.begin && at + kWidth<T> <= sight.end) return;
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i)
      if (at + i < sight.begin || at + i >= sight.end) values[i] = 0.0f;
  };
  // Reads the probabilities of a pack and their gradients.
  const auto read = [&](int p, int at, float(&values)[kWidth<T>], float(&grads)[kWidth<T>]) {
    widen_pack(p_packs[p], values);
    widen_pack(g_packs[p], grads);
    if constexpr (kDropped) {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) grads[i] *= kept >> (p * kWidth<T> + i) & 1 ? shape.mask.scale : 0.0f;
    }
    hide(at, values);
  };

  float product = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int from = first + chunk * kStep * kPacks;
    load(from);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!sees<kWidth<T>>(sight, from + p * kStep)) continue;
      float values[kWidth<T>], grads[kWidth<T>];
      read(p, from + p * kStep, values, grads);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) grads[i] *= values[i];
      hide(from + p * kStep, grads);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) product += grads[i];
    }
  }
  product = over_row.template operator()<Sum>(product);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int from = first + chunk * kStep * kPacks;
    if (chunks > 1) load(from);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = from + p * kStep;
      if (at >= keys) continue;
      float values[kWidth<T>] = {}, grads[kWidth<T>], slopes[kWidth<T>] = {};
      if (sees<kWidth<T>>(sight, at)) {
        read(p, at, values, grads);
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) slopes[i] = values[i] * (grads[i] - product) * shape.scale;
        hide(at, slopes);
      }
      store_pack<kWhole>(to, at, keys, slopes);
      if constexpr (kDropped) {
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) values[i] *= kept >> (p * kWidth<T> + i) & 1 ? shape.mask.scale : 0.0f;
        store_pack<kWhole>(dropped + int64_t(row) * keys, at, keys, values);
      }
    }
  }
}

template <typename T, int kThreads, bool kWhole>
__global__ void __launch_bounds__(kBlock<kThreads>, kResident<T, kThreads, kWhole, false>)
    softmax_forward(MaskedSoftmax shape, const T* __restrict__ scores, T* __restrict__ out) {
  forward_row<T, kThreads, kWhole, false>(shape, scores, out, nullptr);
}

template <typename T, int kThreads, bool kWhole>
__global__ void __launch_bounds__(kBlock<kThreads>, kResident<T, kThreads, kWhole, true>)
    softmax_backward(MaskedSoftmax shape, const T* grad, const T* __restrict__ out, T* grad_scores) {
  backward_row<T, kThreads, kWhole, false>(shape, grad, out, grad_scores, nullptr);
}

// The Philox generator needs many registers: blocks have at most kMostDropping threads, which leaves 128 for each.
constexpr int kMostDropping = 512;

template <typename T, int kThreads, bool kWhole>
__global__ void __launch_bounds__(kBlock<kThreads>, kMostDropping / kBlock<kThreads>)
    softmax_dropout_forward(MaskedSoftmax shape, const T* __restrict__ scores, T* __restrict__ out,
                            T* __restrict__ dropped) {
  forward_row<T, kThreads, kWhole, true>(shape, scores, out, dropped);
}

template <typename T, int kThreads, bool kWhole>
__global__ void __launch_bounds__(kBlock<kThreads>, kMostDropping / kBlock<kThreads>)
    softmax_dropout_backward(MaskedSoftmax shape, const T* grad, const T* __restrict__ out, T* grad_scores,
                             T* dropped) {
  backward_row<T, kThreads, kWhole, true>(shape, grad, out, grad_scores, dropped);
}

bool fits(int64_t rows, int64_t keys) { return rows <= kMostBlocks && keys < kMostBlocks - 65536; }

// Calls body with the threads per row, whether rows are aligned (kWhole), and the launch configuration.
template <int kMost, int kOfWarp, typename Body>
int with_rows(const MaskedSoftmax& shape, bool whole, Body body) {
  const auto with = [&](auto threads, auto of_whole) {
    constexpr int kThreads = decltype(threads)::value;
    const dim3 grid(unsigned(blocks_for(shape.rows, kBlock<kThreads> / kThreads)));
    return body(threads, of_whole, grid, kBlock<kThreads>, RowReduction<kThreads>::kSharedBytes);
  };
  const bool for_a_warp = shape.keys <= kWarp * kOfWarp;
  if (!whole && for_a_warp) return with(Constant<kWarp>{}, std::false_type{});
  if (!whole) return with(Constant<kThreadsOfOthers>{}, std::false_type{});
  if (for_a_warp) return with(Constant<kWarp>{}, std::true_type{});
  return with_threads<kMost>(shape.keys, kElements, [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value > kWarp ? decltype(threads)::value : 128;
    return with(Constant<kThreads>{}, std::true_type{});
  });
}

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_softmax_forward(int64_t dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                           double scale, const float* slopes, const int64_t* places,
                                           const int64_t* starts, const uint8_t* hidden, const void* scores, void* out,
                                           const int64_t* samples, int64_t key, int64_t threshold, int64_t first_head,
                                           void* dropped, int64_t stream) {
  const int64_t rows = batch * heads * queries;
  if (rows == 0 || keys == 0) return 0;
  if (!fits(rows, keys)) return int(MEGADS_TOO_LARGE);
  const MaskedSoftmax shape{uint32_t(rows), uint32_t(heads), uint32_t(queries), int(keys), float(scale), slopes,
                            places,         starts,          hidden, mask_of(samples, key, threshold, first_head)};
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto* from = static_cast<const T*>(scores);
    auto *to = static_cast<T*>(out), *left = static_cast<T*>(dropped);
    const bool whole = are_whole<T>(keys, {scores, out, samples ? dropped : nullptr});
    if (samples)
      return with_rows<kMostDropping, kElementsOfWarp>(shape, whole, [&](auto threads, auto of_whole, auto... sizes) {
        return launch(softmax_dropout_forward<T, decltype(threads)::value, decltype(of_whole)::value>, sizes...,
                      stream, shape, from, to, left);
      });
    return with_rows<1024, kElementsOfWarp>(shape, whole, [&](auto threads, auto of_whole, auto... sizes) {
      return launch(softmax_forward<T, decltype(threads)::value, decltype(of_whole)::value>, sizes..., stream, shape,
                    from, to);
    });
  });
}

extern "C" int megads_cuda_softmax_backward(int64_t dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                            double scale, const int64_t* places, const int64_t* starts,
                                            const void* grad, const void* out, void* grad_scores,
                                            const int64_t* samples, int64_t key, int64_t threshold, int64_t first_head,
                                            void* dropped, int64_t stream) {
  const int64_t rows = batch * heads * queries;
  if (rows == 0 || keys == 0) return 0;
  if (!fits(rows, keys)) return int(MEGADS_TOO_LARGE);
  const MaskedSoftmax shape{uint32_t(rows), uint32_t(heads), uint32_t(queries), int(keys), float(scale), nullptr,
                            places,         starts,          nullptr, mask_of(samples, key, threshold, first_head)};
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto *arriving = static_cast<const T*>(grad), *probabilities = static_cast<const T*>(out);
    auto *to = static_cast<T*>(grad_scores), *left = static_cast<T*>(dropped);
    const bool whole = are_whole<T>(keys, {grad, out, grad_scores, samples ? dropped : nullptr});
    if (samples)
      return with_rows<kMostDropping, kElements>(shape, whole, [&](auto threads, auto of_whole, auto... sizes) {
        return launch(softmax_dropout_backward<T, decltype(threads)::value, decltype(of_whole)::value>, sizes...,
                      stream, shape, arriving, probabilities, to, left);
      });
    return with_rows<1024, kElements>(shape, whole, [&](auto threads, auto of_whole, auto... sizes) {
      return launch(softmax_backward<T, decltype(threads)::value, decltype(of_whole)::value>, sizes..., stream, shape,
                    arriving, probabilities, to);
    });
  });
}
