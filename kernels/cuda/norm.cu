// LayerNorm and RMSNorm of x * kept * kept_scale + residual; see launchers.h.
//
// Forward: the threads of a row hold it in registers, 16 elements each: 32 threads up to 512 columns (four rows a
// block), a block of 128 to 1024 threads up to 16384; of fp32 half as many, up to 8192. The mean is taken off before
// squares are summed, so that a large mean costs no digits. Reads x, residual and mask once, writes sum and norm: 2 to
// 4 * elements * size + elements bytes.
//
// Backward: megads_cuda_norm_partials blocks take rows in turns. A thread keeps the gradients of weight and bias of its
// own 8 columns in registers over all rows of its block, and stores them in `partial` at the end; columns.cuh sums
// those. Reads gradient and normed input once and writes one gradient, 3 * elements * size bytes, and what is optional.
//
// Longer rows are read in chunks, once a pass, mostly from the L2 cache.
#include "columns.cuh"

namespace megads::cuda {
namespace {

// Elements of a row that a thread of the forward pass holds, and the most threads: what registers have room for.
template <typename T, int kThreads>
constexpr int kElements = sizeof(T) < 4 || kThreads > 256 ? 16 : 8;
template <typename T>
constexpr int kMostThreads = sizeof(T) < 4 ? 1024 : 512;

struct Norm {
  int rows, width;
  float eps;
  bool centred;
};

// What is added to x before it is normed.
template <typename T>
struct Entrance {
  const T* residual;
  const uint8_t* kept;
  float kept_scale;
  T* added;
};

// One thread's part of a row: pack p starts at element first + p * kStep.
template <typename T, int kThreads, int kPacks>
struct Part {
  static constexpr int kStep = kThreads * kWidth<T>;
  static constexpr int kChunk = kStep * kPacks;

  float values[kPacks][kWidth<T>];

  __device__ __forceinline__ void load(const T* row, int first, int width) {
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs(packs, row, first, kStep, width, 0, width);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[p][i] = widen(packs[p].elements[i]);
  }

  // Applies mask and residual, stores the sum, and goes on with it as it was rounded.
  __device__ __forceinline__ void enter(const Entrance<T>& entrance, int64_t offset, int first, int width) {
    if (entrance.kept) {
      Pack<uint8_t, kWidth<T>> packs[kPacks];
      load_packs(packs, entrance.kept + offset, first, kStep, width, 0, width);
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i)
          values[p][i] = packs[p].elements[i] ? values[p][i] * entrance.kept_scale : 0.0f;
    }
    if (entrance.residual) {
      Pack<T, kWidth<T>> packs[kPacks];
      load_packs(packs, entrance.residual + offset, first, kStep, width, 0, width);
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) values[p][i] += widen(packs[p].elements[i]);
    }
    if (!entrance.added) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * kStep >= width) continue;
      store_pack(entrance.added + offset, first + p * kStep, width, values[p]);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[p][i] = widen(narrow<T>(values[p][i]));
    }
  }

  __device__ __forceinline__ float sum() const {
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) total += values[p][i];
    return total;
  }

  __device__ __forceinline__ float squares(float mean, int first, int width) const {
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const int column = first + p * kStep + i;
        const float centred = column >= 0 && column < width ? values[p][i] - mean : 0.0f;
        total += centred * centred;
      }
    return total;
  }
};

template <typename T, int kThreads>
__global__ void __launch_bounds__(kBlock<kThreads>, 1)
    norm_forward(Norm shape, const T* x, Entrance<T> entrance, const T* __restrict__ weight,
                 const T* __restrict__ bias, T* out, float* __restrict__ statistics) {
  constexpr int kPacks = kElements<T, kThreads> / kWidth<T>;
  constexpr int kRows = kBlock<kThreads> / kThreads;
  using RowPart = Part<T, kThreads, kPacks>;
  const unsigned row = blockIdx.x * kRows + threadIdx.x / kThreads;
  if (kRows > 1 && row >= unsigned(shape.rows)) return;  // a whole warp, and no barrier follows
  const int width = shape.width, thread = threadIdx.x % kThreads;
  const int64_t offset = int64_t(row) * width;
  const int first = thread * kWidth<T> - shift_of(x + offset);
  const int chunks = (width + shift_of(x + offset) + RowPart::kChunk - 1) / RowPart::kChunk;
  RowReduction<kThreads> over_row;
  RowPart part;

  float sum = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    part.load(x + offset, first + chunk * RowPart::kChunk, width);
    part.enter(entrance, offset, first + chunk * RowPart::kChunk, width);
    sum += part.sum();
  }
  // Once it is stored, the sum is what is read again; by the thread that wrote it.
  const T* again = (entrance.added ? entrance.added : x) + offset;
  const float mean = shape.centred ? over_row.template operator()<Sum>(sum) / width : 0.0f;
  float squares = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunks > 1) part.load(again, first + chunk * RowPart::kChunk, width);
    squares += part.squares(mean, first + chunk * RowPart::kChunk, width);
  }
  const float reciprocal = rsqrtf(over_row.template operator()<Sum>(squares) / width + shape.eps);
  if (thread == 0) {
    statistics[2 * int64_t(row)] = mean;
    statistics[2 * int64_t(row) + 1] = reciprocal;
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = first + chunk * RowPart::kChunk;
    if (chunks > 1) part.load(again, at, width);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = at + p * RowPart::kStep;
      if (column >= width) continue;
      const auto of_weight = load_pack<kWidth<T>>(weight, column, width);
      Pack<T, kWidth<T>> of_bias{};
      if (bias) of_bias = load_pack<kWidth<T>>(bias, column, width);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i)
        part.values[p][i] = (part.values[p][i] - mean) * reciprocal * widen(of_weight.elements[i]) +
                            (bias ? widen(of_bias.elements[i]) : 0.0f);
      store_pack(out + offset, column, width, part.values[p]);
    }
  }
}

// What the backward pass reads and writes.
template <typename T>
struct Gradients {
  const T* grad;
  const T* added;  // grad_added, or null
  const T* normed;
  const T* weight;
  const float* statistics;
  const uint8_t* kept;
  float kept_scale;
  T* of_residual;
  T* of_x;  // null without a mask
  float* partial;
};

constexpr int kColumnsOfThread = 8;

// One thread's columns of one chunk of one row.
template <typename T, int kPacks>
struct Pair {
  Pack<T, kWidth<T>> grad[kPacks], normed[kPacks];

  // Adds sum(g w) and sum(g w xhat).
  __device__ __forceinline__ void products(const T* weight, int first, int step, int width, float mean,
                                           float reciprocal, float& plain, float& with_normed) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const auto of_weight = load_pack<kWidth<T>>(weight, first + p * step, width);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const float scaled = widen(grad[p].elements[i]) * widen(of_weight.elements[i]);
        plain += scaled;
        with_normed += scaled * (widen(normed[p].elements[i]) - mean) * reciprocal;
      }
    }
  }
};

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_backward(Norm shape, Gradients<T> of) {
  constexpr int kPacks = kColumnsOfThread / kWidth<T>;
  constexpr int kStep = kThreads * kWidth<T>;
  constexpr int kChunk = kStep * kPacks;
  const int width = shape.width;
  // Columns are cut alike in all rows, whatever their addresses: a thread sums its own ones up.
  const int first = threadIdx.x * kWidth<T>;
  const int chunks = (width + kChunk - 1) / kChunk;
  float* of_weight = of.partial + int64_t(blockIdx.x) * 2 * width;
  float* of_bias = of_weight + width;
  RowReduction<kThreads> over_row;
  Pair<T, kPacks> pair;
  float weight_sums[kPacks][kWidth<T>] = {}, bias_sums[kPacks][kWidth<T>] = {};

  for (int row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const int64_t offset = int64_t(row) * width;
    const float mean = of.statistics[2 * int64_t(row)], reciprocal = of.statistics[2 * int64_t(row) + 1];
    float plain = 0.0f, with_normed = 0.0f;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int at = first + chunk * kChunk;
      load_packs(pair.grad, of.grad + offset, at, kStep, width, 0, width);
      load_packs(pair.normed, of.normed + offset, at, kStep, width, 0, width);
      pair.products(of.weight, at, kStep, width, mean, reciprocal, plain, with_normed);
    }
    over_row.template both<Sum>(plain, with_normed);
    plain = shape.centred ? plain / width : 0.0f;
    with_normed /= width;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int at = first + chunk * kChunk;
      if (chunks > 1) {
        load_packs(pair.grad, of.grad + offset, at, kStep, width, 0, width);
        load_packs(pair.normed, of.normed + offset, at, kStep, width, 0, width);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = at + p * kStep;
        if (column >= width) continue;
        const auto weights = load_pack<kWidth<T>>(of.weight, column, width);
        Pack<T, kWidth<T>> more{};
        if (of.added) more = load_pack<kWidth<T>>(of.added + offset, column, width);
        float values[kWidth<T>];
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) {
          const float grad = widen(pair.grad[p].elements[i]);
          const float normal = (widen(pair.normed[p].elements[i]) - mean) * reciprocal;
          values[i] = (grad * widen(weights.elements[i]) - plain - normal * with_normed) * reciprocal +
                      widen(more.elements[i]);
          if (chunks == 1) {
            weight_sums[p][i] += grad * normal;
            bias_sums[p][i] += grad;
          } else if (column + i < width) {
            // Its own places: nobody else reads or writes them.
            const bool begins = row == int(blockIdx.x);
            of_weight[column + i] = (begins ? 0.0f : of_weight[column + i]) + grad * normal;
            of_bias[column + i] = (begins ? 0.0f : of_bias[column + i]) + grad;
          }
        }
        store_pack(of.of_residual + offset, column, width, values);
        if (of.kept) {
          const auto kept = load_pack<kWidth<T>>(of.kept + offset, column, width);
#pragma unroll
          for (int i = 0; i < kWidth<T>; ++i) values[i] = kept.elements[i] ? values[i] * of.kept_scale : 0.0f;
          store_pack(of.of_x + offset, column, width, values);
        }
      }
    }
  }
  if (chunks > 1) return;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    store_pack(of_weight, first + p * kStep, width, weight_sums[p]);
    store_pack(of_bias, first + p * kStep, width, bias_sums[p]);
  }
}

int threads_of_backward(int64_t width) {
  int threads = 128;
  while (threads < 1024 && threads * kColumnsOfThread < width) threads *= 2;
  return threads;
}

// Steps through rows and columns go beyond the last by at most a grid or a chunk.
bool fits(int64_t rows, int64_t width) { return rows < kMostBlocks - 65536 && width < kMostBlocks - 65536; }

}  // namespace
}  // namespace megads::cuda

using namespace megads::cuda;

extern "C" int megads_cuda_norm_forward(int64_t dtype, int64_t rows, int64_t width, double eps, int64_t centred,
                                        const void* x, const void* residual, const uint8_t* kept, double kept_scale,
                                        const void* weight, const void* bias, void* added, void* out,
                                        float* statistics, int64_t stream) {
  if (rows == 0 || width == 0) return 0;
  if (!fits(rows, width)) return int(MEGADS_TOO_LARGE);
  const Norm shape{int(rows), int(width), float(eps), centred != 0};
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Entrance<T> entrance{static_cast<const T*>(residual), kept, float(kept_scale), static_cast<T*>(added)};
    return with_threads<kMostThreads<T>>(width, kElements<T, 32>, [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const dim3 grid(unsigned(blocks_for(rows, kBlock<kThreads> / kThreads)));
      return launch(norm_forward<T, kThreads>, grid, kBlock<kThreads>, RowReduction<kThreads>::kSharedBytes, stream,
                    shape, static_cast<const T*>(x), entrance, static_cast<const T*>(weight),
                    static_cast<const T*>(bias), static_cast<T*>(out), statistics);
    });
  });
}

// Enough blocks to fill 132 multiprocessors, as an H100 has, with as many threads of 64 registers each as there is room
// for, but not more than there are rows.
extern "C" int64_t megads_cuda_norm_partials(int64_t rows, int64_t width) {
  const int64_t most = 132 * (1024 / threads_of_backward(width));
  return rows < most ? rows : most;
}

extern "C" int megads_cuda_norm_backward(int64_t dtype, int64_t rows, int64_t width, int64_t centred, const void* grad,
                                         const void* grad_added, const void* normed, const void* weight,
                                         const float* statistics, const uint8_t* kept, double kept_scale,
                                         void* grad_residual, void* grad_x, float* partial, void* grad_weight,
                                         void* grad_bias, int64_t stream) {
  if (width == 0) return 0;
  if (!fits(rows, width)) return int(MEGADS_TOO_LARGE);
  const Norm shape{int(rows), int(width), 0.0f, centred != 0};
  const int64_t blocks = megads_cuda_norm_partials(rows, width);
  return with_dtype(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Gradients<T> of{static_cast<const T*>(grad), static_cast<const T*>(grad_added),
                          static_cast<const T*>(normed), static_cast<const T*>(weight), statistics, kept,
                          float(kept_scale), static_cast<T*>(grad_residual), static_cast<T*>(grad_x), partial};
    const auto pass = [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      return launch(norm_backward<T, kThreads>, dim3(unsigned(blocks)), kThreads,
                    RowReduction<kThreads>::kSharedBytes, stream, shape, of);
    };
    int error = 0;
    if (blocks) {
      switch (threads_of_backward(width)) {
        case 128: error = pass(Constant<128>{}); break;
        case 256: error = pass(Constant<256>{}); break;
        case 512: error = pass(Constant<512>{}); break;
        default: error = pass(Constant<1024>{});
      }
    }
    if (!error) error = launch_sum_columns<T>(partial, blocks, 2 * width, width, grad_weight, stream);
    if (!error && grad_bias)
      error = launch_sum_columns<T>(partial + width, blocks, 2 * width, width, grad_bias, stream);
    return error;
  });
}
