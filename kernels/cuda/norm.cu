// LayerNorm and RMSNorm of x * kept * kept_scale + residual; see launchers.h.
//
// Forward: a row is held in registers, 16 elements per thread: 32 threads up to 512 columns (four rows per block), a
// block of 128 to 1024 threads up to 16384; for fp32 half as many, up to 8192. The mean is subtracted before squares
// are summed, so that a large mean costs no precision. Traffic: x, residual and mask read once, sum and norm written,
// 2 to 4 * elements * size + elements bytes.
//
// Backward: megads_cuda_norm_partials blocks loop over the rows with a grid stride. A thread accumulates the gradients
// of weight and bias of its 8 columns in registers over all rows of its block and stores them in `partial` at the end;
// columns.cuh reduces those. Traffic: gradient and norm input read once and one gradient written, 3 * elements * size
// bytes, plus the optional tensors.
//
// Longer rows are read in chunks, once per pass, mostly from the L2 cache; so are unaligned rows (not kWhole, see
// device.cuh), which have two block sizes.
#include <cuda_pipeline_primitives.h>

#include "columns.cuh"

namespace megads::cuda {
namespace {

// Elements per thread and maximum threads per row in the forward pass, limited by registers.
template <typename T, int kThreads>
constexpr int kElements = sizeof(T) < 4 || kThreads > 256 ? 16 : 8;
template <typename T>
constexpr int kMostThreads = sizeof(T) < 4 ? 1024 : 512;

// Threads per row for unaligned rows (not kWhole) that are too long for a warp.
constexpr int kThreadsOfOthers = 256;

// Target number of resident blocks per multiprocessor, which limits the registers per thread.
template <int kThreads, bool kWhole>
constexpr int kResident = !kWhole || kThreads == 1024 ? 1 : 1280 / kBlock<kThreads>;

struct Norm {
  int rows, width;
  float eps;
  bool centred;
};

// Dropout and residual addition, fused in front of the norm.
template <typename T>
struct Entrance {
  const T* residual;
  const uint8_t* kept;
  float kept_scale;
  T* added;
};

// One thread's part of a row: pack p starts at element first + p * kStep.
template <typename T, int kThreads, int kPacks, bool kWhole>
struct Part {
  static constexpr int kStep = kThreads * kWidth<T>;
  static constexpr int kChunk = kStep * kPacks;

  float values[kPacks][kWidth<T>];

  __device__ __forceinline__ void load(const T* row, int first, int width) {
    Pack<T, kWidth<T>> packs[kPacks];
    load_packs<kWhole>(packs, row, first, kStep, width, 0, width);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) widen_pack(packs[p], values[p]);
  }

  // Applies mask and residual, stores the sum, and continues with its rounded values.
  __device__ __forceinline__ void enter(const Entrance<T>& entrance, int64_t offset, int first, int width) {
    if (entrance.kept) {
      Pack<uint8_t, kWidth<T>> packs[kPacks];
      load_packs<kWhole>(packs, entrance.kept + offset, first, kStep, width, 0, width);
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i)
          values[p][i] = packs[p][i] ? values[p][i] * entrance.kept_scale : 0.0f;
    }
    if (entrance.residual) {
      Pack<T, kWidth<T>> packs[kPacks];
      load_packs<kWhole>(packs, entrance.residual + offset, first, kStep, width, 0, width);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        float more[kWidth<T>];
        widen_pack(packs[p], more);
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) values[p][i] += more[i];
      }
    }
    if (!entrance.added) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * kStep >= width) continue;
      store_pack<kWhole>(entrance.added + offset, first + p * kStep, width, values[p]);
      widen_pack(narrow_pack<T>(values[p]), values[p]);
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
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * kStep >= width) continue;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const float centred = is_inside<kWhole>(first + p * kStep + i, width) ? values[p][i] - mean : 0.0f;
        total += centred * centred;
      }
    }
    return total;
  }
};

template <typename T, int kThreads, bool kWhole>
__global__ void __launch_bounds__(kBlock<kThreads>, kResident<kThreads, kWhole>)
    norm_forward(Norm shape, const T* x, Entrance<T> entrance, const T* __restrict__ weight,
                 const T* __restrict__ bias, T* out, float* __restrict__ statistics) {
  constexpr int kPacks = kElements<T, kThreads> / kWidth<T>;
  constexpr int kRows = kBlock<kThreads> / kThreads;
  using RowPart = Part<T, kThreads, kPacks, kWhole>;
  const unsigned row = blockIdx.x * kRows + threadIdx.x / kThreads;
  if (kRows > 1 && row >= unsigned(shape.rows)) return;  // the whole warp exits, and no barrier follows
  const int width = shape.width, thread = threadIdx.x % kThreads;
  const int64_t offset = int64_t(row) * width;
  const int shift = shift_of<kWhole>(x + offset), first = thread * kWidth<T> - shift;
  const int chunks = (width + shift + RowPart::kChunk - 1) / RowPart::kChunk;
  RowReduction<kThreads> over_row;
  RowPart part;

  float sum = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    part.load(x + offset, first + chunk * RowPart::kChunk, width);
    part.enter(entrance, offset, first + chunk * RowPart::kChunk, width);
    sum += part.sum();
  }
  // Later passes read the stored sum if there is one; each thread reads what it wrote itself.
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
      float weights[kWidth<T>], biases[kWidth<T>] = {};
      widen_pack(load_pack<kWidth<T>, kWhole>(weight, column, width), weights);
      if (bias) widen_pack(load_pack<kWidth<T>, kWhole>(bias, column, width), biases);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i)
        part.values[p][i] = (part.values[p][i] - mean) * reciprocal * weights[i] + biases[i];
      store_pack<kWhole>(out + offset, column, width, part.values[p]);
    }
  }
}

// Inputs and outputs of the backward pass.
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

// Target number of resident threads per multiprocessor in the backward pass; for an A100 the same code takes a few more
// registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kThreadsHeld = 768;
#else
constexpr int kThreadsHeld = 1024;
#endif

// One pack of a row in fp32: gradient times weight, and normalized input.
template <typename T>
struct Columns {
  float scaled[kWidth<T>], normal[kWidth<T>];

  Columns() = default;

  // Adds the row's contribution to the gradients of weight and bias.
  __device__ __forceinline__ Columns(const Pack<T, kWidth<T>>& grad, const Pack<T, kWidth<T>>& normed,
                                     const Pack<T, kWidth<T>>& weight, float mean, float reciprocal,
                                     float (&weight_sums)[kWidth<T>], float (&bias_sums)[kWidth<T>]) {
    float weights[kWidth<T>];
    widen_pack(grad, scaled);
    widen_pack(normed, normal);
    widen_pack(weight, weights);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      normal[i] = (normal[i] - mean) * reciprocal;
      weight_sums[i] += scaled[i] * normal[i];
      bias_sums[i] += scaled[i];
      scaled[i] *= weights[i];
    }
  }

  // Adds sum(g w) and sum(g w xhat).
  __device__ __forceinline__ void add(float& plain, float& with_normed) const {
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      plain += scaled[i];
      with_normed += scaled[i] * normal[i];
    }
  }

  // Stores the gradient of the norm input, computed from the row's means of both sums; with a mask, also the gradient
  // of x.
  template <bool kWhole>
  __device__ __forceinline__ void store(const Gradients<T>& of, int64_t offset, int column, int width, float plain,
                                        float with_normed, float reciprocal) const {
    float values[kWidth<T>], more[kWidth<T>] = {};
    if (of.added) widen_pack(load_pack<kWidth<T>, kWhole>(of.added + offset, column, width), more);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i)
      values[i] = (scaled[i] - plain - normal[i] * with_normed) * reciprocal + more[i];
    store_pack<kWhole>(of.of_residual + offset, column, width, values);
    if (!of.kept) return;
    const auto kept = load_pack<kWidth<T>, kWhole>(of.kept + offset, column, width);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) values[i] = kept[i] ? values[i] * of.kept_scale : 0.0f;
    store_pack<kWhole>(of.of_x + offset, column, width, values);
  }
};

// Backward pass for aligned rows (kWhole) that fit the block's threads. The next row is copied to shared memory
// asynchronously while the current one is processed, into the buffer of the previous row: the barrier in the reduction
// guarantees that this has been read. A thread reads only what it has copied itself.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads < kThreadsHeld ? kThreadsHeld / kThreads : 1)
    norm_backward(Norm shape, Gradients<T> of) {
  constexpr int kPacks = kColumnsOfThread / kWidth<T>;
  constexpr int kStep = kThreads * kWidth<T>;
  using Columns = Columns<T>;
  using OnePack = Pack<T, kWidth<T>>;
  const int width = shape.width, first = int(threadIdx.x) * kWidth<T>;
  RowReduction<kThreads> over_row;
  OnePack* arriving = reinterpret_cast<OnePack*>(megads_shared + RowReduction<kThreads>::kSharedBytes);
  OnePack weights[kPacks];
  float weight_sums[kPacks][kWidth<T>] = {}, bias_sums[kPacks][kWidth<T>] = {};
  load_packs<true>(weights, of.weight, first, kStep, width, 0, width);
  // Shared-memory slot of the thread's gradients of a row; its norm inputs follow those gradients of all threads.
  const auto place = [&](int turn, int p) { return (turn * kPacks + p) * 2 * kThreads + int(threadIdx.x); };
  const auto ask_for = [&](int row, int turn) {
    const int64_t offset = int64_t(row) * width + first;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (row >= shape.rows || first + p * kStep >= width) continue;
      OnePack* to = arriving + place(turn, p);
      __pipeline_memcpy_async(to, of.grad + offset + p * kStep, sizeof(OnePack));
      __pipeline_memcpy_async(to + kThreads, of.normed + offset + p * kStep, sizeof(OnePack));
    }
    __pipeline_commit();
  };

  int turn = 0;
  ask_for(int(blockIdx.x), turn);
  for (int row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const float mean = of.statistics[2 * int64_t(row)], reciprocal = of.statistics[2 * int64_t(row) + 1];
    Columns columns[kPacks];
    float plain = 0.0f, with_normed = 0.0f;
    ask_for(row + int(gridDim.x), turn ^ 1);
    __pipeline_wait_prior(1);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * kStep >= width) continue;
      const OnePack* from = arriving + place(turn, p);
      columns[p] = Columns(from[0], from[kThreads], weights[p], mean, reciprocal, weight_sums[p], bias_sums[p]);
      columns[p].add(plain, with_normed);
    }
    over_row.template both<Sum>(plain, with_normed);
    plain = shape.centred ? plain / width : 0.0f;
    with_normed /= width;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = first + p * kStep;
      if (column >= width) continue;
      columns[p].template store<true>(of, int64_t(row) * width, column, width, plain, with_normed, reciprocal);
    }
    turn ^= 1;
  }
  float* of_weight = of.partial + int64_t(blockIdx.x) * 2 * width;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    store_pack(of_weight, first + p * kStep, width, weight_sums[p]);
    store_pack(of_weight + width, first + p * kStep, width, bias_sums[p]);
  }
}

// Backward pass for all other rows, one pack at a time; rows are read twice.
template <typename T>
__global__ void __launch_bounds__(kThreadsOfOthers) norm_backward_others(Norm shape, Gradients<T> of) {
  constexpr int kStep = kThreadsOfOthers * kWidth<T>;
  // All rows are split into packs at the same columns, whatever their addresses: a thread sums its own columns.
  const int width = shape.width, first = int(threadIdx.x) * kWidth<T>;
  float* of_weight = of.partial + int64_t(blockIdx.x) * 2 * width;
  float* of_bias = of_weight + width;
  RowReduction<kThreadsOfOthers> over_row;
  for (int row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const int64_t offset = int64_t(row) * width;
    const float mean = of.statistics[2 * int64_t(row)], reciprocal = of.statistics[2 * int64_t(row) + 1];
    const auto columns_at = [&](int column, float(&weight_sums)[kWidth<T>], float(&bias_sums)[kWidth<T>]) {
      return Columns<T>(load_pack<kWidth<T>>(of.grad + offset, column, width),
                        load_pack<kWidth<T>>(of.normed + offset, column, width),
                        load_pack<kWidth<T>>(of.weight, column, width), mean, reciprocal, weight_sums, bias_sums);
    };
    float plain = 0.0f, with_normed = 0.0f;
    for (int column = first; column < width; column += kStep) {
      float unused[kWidth<T>] = {};
      columns_at(column, unused, unused).add(plain, with_normed);
    }
    over_row.template both<Sum>(plain, with_normed);
    plain = shape.centred ? plain / width : 0.0f;
    with_normed /= width;
    for (int column = first; column < width; column += kStep) {
      // No other thread reads or writes these elements of `partial`.
      float weight_sums[kWidth<T>] = {}, bias_sums[kWidth<T>] = {};
      if (row != int(blockIdx.x)) {
        widen_pack(load_pack<kWidth<T>>(of_weight, column, width), weight_sums);
        widen_pack(load_pack<kWidth<T>>(of_bias, column, width), bias_sums);
      }
      const Columns<T> columns = columns_at(column, weight_sums, bias_sums);
      store_pack(of_weight, column, width, weight_sums);
      store_pack(of_bias, column, width, bias_sums);
      columns.template store<false>(of, offset, column, width, plain, with_normed, reciprocal);
    }
  }
}

int threads_of_backward(int64_t width) {
  int threads = 128;
  while (threads < 1024 && threads * kColumnsOfThread < width) threads *= 2;
  return threads;
}

// Loop indices exceed the last row or column by at most one grid or chunk.
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
    const auto pass = [&](auto threads, auto whole) {
      constexpr int kThreads = decltype(threads)::value;
      const dim3 grid(unsigned(blocks_for(rows, kBlock<kThreads> / kThreads)));
      return launch(norm_forward<T, kThreads, decltype(whole)::value>, grid, kBlock<kThreads>,
                    RowReduction<kThreads>::kSharedBytes, stream, shape, static_cast<const T*>(x), entrance,
                    static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out), statistics);
    };
    if (are_whole<T>(width, {x, residual, kept, weight, bias, added, out}))
      return with_threads<kMostThreads<T>>(width, kElements<T, 32>,
                                           [&](auto threads) { return pass(threads, std::true_type{}); });
    if (width <= 32 * kElements<T, 32>) return pass(Constant<32>{}, std::false_type{});
    return pass(Constant<kThreadsOfOthers>{}, std::false_type{});
  });
}

// Enough blocks to fill the 132 multiprocessors of an H100 with as many threads as fit at 64 registers each, but no
// more than there are rows.
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
    const auto pass = [&](auto* kernel, int threads, int arriving) {
      const int shared_bytes = RowReduction<1024>::kSharedBytes + threads * arriving;
      return launch(kernel, dim3(unsigned(blocks)), threads, shared_bytes, stream, shape, of);
    };
    // Shared memory per thread: its columns of gradient and norm input, for two rows.
    constexpr int kArriving = 2 * 2 * kColumnsOfThread * int(sizeof(T));
    const int threads = threads_of_backward(width);
    int error = 0;
    if (blocks && width <= threads * kColumnsOfThread &&
        are_whole<T>(width, {grad, grad_added, normed, weight, kept, grad_residual, grad_x})) {
      switch (threads) {
        case 128: error = pass(norm_backward<T, 128>, 128, kArriving); break;
        case 256: error = pass(norm_backward<T, 256>, 256, kArriving); break;
        case 512: error = pass(norm_backward<T, 512>, 512, kArriving); break;
        default: error = pass(norm_backward<T, 1024>, 1024, kArriving);
      }
    } else if (blocks) {
      error = pass(norm_backward_others<T>, kThreadsOfOthers, 0);
    }
    if (!error) error = launch_sum_columns<T>(partial, blocks, 2 * width, width, grad_weight, stream);
    if (!error && grad_bias)
      error = launch_sum_columns<T>(partial + width, blocks, 2 * width, width, grad_bias, stream);
    return error;
  });
}
