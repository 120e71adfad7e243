// Softmax of scaled attention scores with ALiBi, causality, documents, padding and dropout; see launchers.h.
//
// A row of scores belongs to one query of one head. Its threads hold all of it in registers, 32 elements each, so that
// it is read once: 32 threads up to 1024 keys (a warp a row, four rows a block), a block of 128 to 512 threads up to
// 16384, and of 1024, whose registers hold 24, up to 24576. Longer rows are read in chunks, once for each of three
// passes, the later two mostly from the L2 cache. Packs of which nothing is seen are never read: half of all under a
// causal mask.
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

// What one query sees.
struct Sight {
  int begin, end;  // keys begin..end - 1
  float slope, place;
  const uint8_t* hidden;  // of its sample, or null
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

// One thread's part of a row: pack p starts at element first + p * kStep.
template <typename T, int kThreads, int kPacks>
struct Part {
  static constexpr int kStep = kThreads * kWidth<T>;
  static constexpr int kChunk = kStep * kPacks;

  float values[kPacks][kWidth<T>];

  // Biased scores of what the query sees, -inf elsewhere.
  __device__ __forceinline__ void load_scores(const T* row, int first, int keys, float scale, const Sight& sight) {
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs(packs, row, first, kStep, keys, sight.begin, sight.end);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const int key = first + p * kStep + i;
        const bool seen = key >= sight.begin && key < sight.end && !(sight.hidden && sight.hidden[key]);
        const float biased = widen(packs[p].elements[i]) * scale + sight.slope * (float(key) - sight.place);
        values[p][i] = seen ? biased : -kInfinity;
      }
    }
  }

  __device__ __forceinline__ float largest(float so_far) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) so_far = fmaxf(so_far, values[p][i]);
    return so_far;
  }

  // Turns the scores to exp(score - base), and returns their sum.
  __device__ __forceinline__ float exponentials(float base) {
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        values[p][i] = expf(values[p][i] - base);
        total += values[p][i];
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
      store_pack(row, at, keys, values[p]);
    }
  }

  // What dropout leaves of what was stored.
  __device__ __forceinline__ void store_dropped(T* row, int first, int keys, const Sight& sight,
                                                const DropoutMask& mask, const MaskRow& drawn) {
    const uint32_t kept = drawn.draw_packs<kWidth<T>, kPacks>(mask, first, kStep, sight.begin, sight.end);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * kStep;
      if (at >= keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[p][i] *= kept >> (p * kWidth<T> + i) & 1 ? mask.scale : 0.0f;
      store_pack(row, at, keys, values[p]);
    }
  }
};

template <typename T, int kThreads, bool kDropped>
__device__ __forceinline__ void forward_row(const MaskedSoftmax& shape, const T* __restrict__ scores,
                                            T* __restrict__ out, T* __restrict__ dropped) {
  constexpr int kPacks = (kThreads < 1024 ? 32 : 24) / kWidth<T>;
  constexpr int kRows = kBlock<kThreads> / kThreads;
  using RowPart = Part<T, kThreads, kPacks>;
  const uint32_t row = blockIdx.x * kRows + threadIdx.x / kThreads;
  if (kRows > 1 && row >= shape.rows) return;  // a whole warp, and no barrier follows
  const T* from = scores + int64_t(row) * shape.keys;
  T* to = out + int64_t(row) * shape.keys;
  const Sight sight = sight_of(shape, row);
  const int thread = threadIdx.x % kThreads;
  const int first = thread * kWidth<T> - shift_of(from);
  const int chunks = (shape.keys + shift_of(from) + RowPart::kChunk - 1) / RowPart::kChunk;
  RowReduction<kThreads> over_row;
  RowPart part;

  float largest = -kInfinity;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    part.load_scores(from, first + chunk * RowPart::kChunk, shape.keys, shape.scale, sight);
    largest = part.largest(largest);
  }
  largest = over_row.template operator()<Largest>(largest);
  // Where nothing but -inf is seen, -inf - -inf would be NaN.
  const float base = largest == -kInfinity ? 0.0f : largest;
  float total = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunks > 1) part.load_scores(from, first + chunk * RowPart::kChunk, shape.keys, shape.scale, sight);
    total += part.exponentials(base);
  }
  total = over_row.template operator()<Sum>(total);
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = first + chunk * RowPart::kChunk;
    if (chunks > 1) {
      part.load_scores(from, at, shape.keys, shape.scale, sight);
      part.exponentials(base);
    }
    part.store(to, at, shape.keys, factor);
    if constexpr (kDropped)
      part.store_dropped(dropped + int64_t(row) * shape.keys, at, shape.keys, sight, shape.mask, mask_row(shape, row));
  }
}

// Gradient and probability of an element are held together, 16 of each a thread: rows up to 16384 are read once.
// With dropout `grad` is that of `dropped`, which is made again: a bit of `kept` for each element that stays.
template <typename T, int kThreads, bool kDropped>
__device__ __forceinline__ void backward_row(const MaskedSoftmax& shape, const T* grad, const T* __restrict__ out,
                                             T* grad_scores, T* dropped) {
  constexpr int kPacks = 16 / kWidth<T>;
  constexpr int kRows = kBlock<kThreads> / kThreads;
  constexpr int kStep = kThreads * kWidth<T>;
  const uint32_t row = blockIdx.x * kRows + threadIdx.x / kThreads;
  if (kRows > 1 && row >= shape.rows) return;
  const int keys = shape.keys;
  const T* probabilities = out + int64_t(row) * keys;
  const T* grad_row = grad + int64_t(row) * keys;
  T* to = grad_scores + int64_t(row) * keys;
  const Sight sight = sight_of(shape, row);
  const int thread = threadIdx.x % kThreads;
  const int first = thread * kWidth<T> - shift_of(probabilities);
  const int chunks = (keys + shift_of(probabilities) + kStep * kPacks - 1) / (kStep * kPacks);
  RowReduction<kThreads> over_row;
  Pack<T, kWidth<T>> p_packs[kPacks], g_packs[kPacks];
  uint32_t kept = ~0u;
  const auto draw = [&](int at) {
    kept = mask_row(shape, row).draw_packs<kWidth<T>, kPacks>(shape.mask, at, kStep, sight.begin, sight.end);
  };
  const auto factor_of = [&](int p, int i) {
    return kDropped ? (kept >> (p * kWidth<T> + i) & 1 ? shape.mask.scale : 0.0f) : 1.0f;
  };

  float product = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = first + chunk * kStep * kPacks;
    load_packs(p_packs, probabilities, at, kStep, keys, sight.begin, sight.end);
    load_packs(g_packs, grad_row, at, kStep, keys, sight.begin, sight.end);
    if constexpr (kDropped) draw(at);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const int key = at + p * kStep + i;
        // The gradient of what is not seen means nothing, and may be NaN.
        if (key >= sight.begin && key < sight.end)
          product += widen(p_packs[p].elements[i]) * (widen(g_packs[p].elements[i]) * factor_of(p, i));
      }
  }
  product = over_row.template operator()<Sum>(product);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = first + chunk * kStep * kPacks;
    if (chunks > 1) {
      load_packs(p_packs, probabilities, at, kStep, keys, sight.begin, sight.end);
      load_packs(g_packs, grad_row, at, kStep, keys, sight.begin, sight.end);
      if constexpr (kDropped) draw(at);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float values[kWidth<T>];
      if (at + p * kStep >= keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const int key = at + p * kStep + i;
        const float slope =
            widen(p_packs[p].elements[i]) * (widen(g_packs[p].elements[i]) * factor_of(p, i) - product);
        values[i] = key >= sight.begin && key < sight.end ? slope * shape.scale : 0.0f;
      }
      store_pack(to, at + p * kStep, keys, values);
      if constexpr (kDropped) {
        // Of what is not seen no probability was read: it is 0.
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) values[i] = widen(p_packs[p].elements[i]) * factor_of(p, i);
        store_pack(dropped + int64_t(row) * keys, at + p * kStep, keys, values);
      }
    }
  }
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kBlock<kThreads>)
    softmax_forward(MaskedSoftmax shape, const T* __restrict__ scores, T* __restrict__ out) {
  forward_row<T, kThreads, false>(shape, scores, out, nullptr);
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kBlock<kThreads>)
    softmax_backward(MaskedSoftmax shape, const T* grad, const T* __restrict__ out, T* grad_scores) {
  backward_row<T, kThreads, false>(shape, grad, out, grad_scores, nullptr);
}

// The generator wants registers: blocks have at most kMostDropping threads, for which there are 128 each.
constexpr int kMostDropping = 512;

template <typename T, int kThreads>
__global__ void __launch_bounds__(kBlock<kThreads>, kMostDropping / kBlock<kThreads>)
    softmax_dropout_forward(MaskedSoftmax shape, const T* __restrict__ scores, T* __restrict__ out,
                            T* __restrict__ dropped) {
  forward_row<T, kThreads, true>(shape, scores, out, dropped);
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kBlock<kThreads>, kMostDropping / kBlock<kThreads>)
    softmax_dropout_backward(MaskedSoftmax shape, const T* grad, const T* __restrict__ out, T* grad_scores,
                             T* dropped) {
  backward_row<T, kThreads, true>(shape, grad, out, grad_scores, dropped);
}

bool fits(int64_t rows, int64_t keys) { return rows <= kMostBlocks && keys < kMostBlocks - 65536; }

// Calls body with the row's number of threads, and the launch's sizes.
template <int kMost, typename Body>
int with_rows(const MaskedSoftmax& shape, int64_t values, Body body) {
  return with_threads<kMost>(shape.keys, values, [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const dim3 grid(unsigned(blocks_for(shape.rows, kBlock<kThreads> / kThreads)));
    return body(threads, grid, kBlock<kThreads>, RowReduction<kThreads>::kSharedBytes);
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
    if (samples)
      return with_rows<kMostDropping>(shape, 32, [&](auto threads, auto... sizes) {
        return launch(softmax_dropout_forward<T, decltype(threads)::value>, sizes..., stream, shape, from, to, left);
      });
    return with_rows<1024>(shape, 32, [&](auto threads, auto... sizes) {
      return launch(softmax_forward<T, decltype(threads)::value>, sizes..., stream, shape, from, to);
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
    if (samples)
      return with_rows<kMostDropping>(shape, 16, [&](auto threads, auto... sizes) {
        return launch(softmax_dropout_backward<T, decltype(threads)::value>, sizes..., stream, shape, arriving,
                      probabilities, to, left);
      });
    return with_rows<1024>(shape, 16, [&](auto threads, auto... sizes) {
      return launch(softmax_backward<T, decltype(threads)::value>, sizes..., stream, shape, arriving, probabilities,
                    to);
    });
  });
}
