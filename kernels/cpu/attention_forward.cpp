#include "attention_blocks.h"
#include "denormals.h"

namespace megads {
namespace {

// Online softmax state of a tile of queries.
struct RunningTile {
  static constexpr int kRows = int(rounded_up(kQueryRows, kLanes));

  float largest[kRows], sum[kRows], shrink[kRows];

  RunningTile() {
    std::fill(largest, largest + kRows, -kInfinity);
    std::fill(sum, sum + kRows, 0.0f);
  }
};

// State of one thread, for blocks of queries.
template <typename T, bool kDropped>
class Forward {
  using Unit = typename Operand<T>::Unit;
  static constexpr int kValues = Operand<T>::kValues;

 public:
  Forward(const Attention& shape, Rows<const T> q, Rows<const T> k, Rows<const T> v)
      : shape_(shape),
        masks_(shape),
        width_(shape.dim),
        q_(q),
        k_(k),
        v_(v),
        queries_(scratch_.take<Unit>(kQueryBlock * width_.row)),
        sums_(scratch_.take<float>(kQueryBlock * width_.numbers)),
        keys_(scratch_.take<Unit>(kKeyBlock * width_.row)),
        keys_by_dim_(scratch_.take<Unit>(width_.row * kKeyBlock)),
        values_(scratch_.take<Unit>(kKeyBlock / kValues * width_.numbers)),
        scores_(scratch_.take<float>(kQueryRows * kKeyBlock)),
        weights_(scratch_.take<Unit>(kQueryRows * kKeyBlock / kValues)) {}

  void run(int64_t b, int64_t h, int64_t query, Rows<T> out, float* statistics) {
    const int64_t rows = std::min(kQueryBlock, shape_.queries - query), tiles = blocks_of(rows, kQueryRows);
    pack_rows(q_.at(b, h, query), q_.row, rows, tiles * kQueryRows, shape_.dim, queries_);
    std::fill(sums_, sums_ + tiles * kQueryRows * width_.numbers, 0.0f);
    RunningTile running[kQueryBlock / kQueryRows];
    Visible of_tiles[kQueryBlock / kQueryRows], all{shape_.keys, -1};
    for (int64_t tile = 0; tile < tiles; ++tile)
      all.add(of_tiles[tile] = visible_to(shape_, b, query + tile * kQueryRows, kQueryRows));
    for (int64_t key = all.first / kLanes * kLanes; key <= all.last; key += kKeyBlock) {
      pack_keys(b, h / shape_.group(), key);
      for (int64_t tile = 0; tile < tiles; ++tile)
        add(b, h, query, tile, key, Columns(of_tiles[tile], key), running[tile]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const RunningTile& tile = running[r / kQueryRows];
      const float sum = tile.sum[r % kQueryRows], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      unpack(sums_ + r * width_.numbers, 0, 1, shape_.dim, inverse * masks_.scale(), out.at(b, h, query + r), 0);
      statistics[2 * r] = tile.largest[r % kQueryRows];
      statistics[2 * r + 1] = inverse;
    }
  }

 private:
  void pack_keys(int64_t b, int64_t key_head, int64_t key) {
    const int64_t count = std::min(kKeyBlock, shape_.keys - key);
    pack_rows(k_.at(b, key_head, key), k_.row, count, kKeyBlock, shape_.dim, keys_);
    transpose(keys_, width_.row, keys_by_dim_);
    pack_interleaved(v_.at(b, key_head, key), v_.row, count, kKeyBlock, shape_.dim, values_);
  }

  // Adds the contribution of a block of keys to a tile of queries.
  void add(int64_t b, int64_t h, int64_t query, int64_t tile, int64_t key, Columns columns, RunningTile& running) {
    if (columns.none()) return;
    rows_product<kQueryRows>(columns.last - columns.first, width_.units, queries_ + tile * kQueryRows * width_.row,
                             width_.row, 1, keys_by_dim_ + columns.first, kKeyBlock, scores_ + columns.first,
                             kKeyBlock, false);
    soften(b, h, query + tile * kQueryRows, key, columns, running);
    float* sums = sums_ + tile * kQueryRows * width_.numbers;
    for (int r = 0; r < kQueryRows; ++r) {
      if (running.shrink[r] == 1.0f) continue;
      for (int64_t d = 0; d < width_.numbers; d += kLanes) {
        float* at = sums + r * width_.numbers + d;
        store(at, load(at) * running.shrink[r]);
      }
    }
    rows_product<kQueryRows>(width_.numbers, (columns.last - columns.first) / kValues,
                             weights_ + columns.first / kValues, kKeyBlock / kValues, 1,
                             values_ + columns.first / kValues * width_.numbers, width_.numbers, sums, width_.numbers,
                             true);
  }

  // Computes unnormalized weights from scores, relative to the running maximum.
  void soften(int64_t b, int64_t h, int64_t query, int64_t key, Columns columns, RunningTile& running) {
    float largest[RunningTile::kRows];
    std::copy(running.largest, running.largest + RunningTile::kRows, largest);
    for (int r = 0; r < kQueryRows; ++r) {
      const ScoreRow row(shape_, b, h, query + r, key);
      const bool all = row.sees(columns.first, columns.last);
      Floats peak = broadcast(largest[r]);
      for (int64_t c = columns.first; c < columns.last; c += kLanes) {
        float* at = scores_ + r * kKeyBlock + c;
        Floats biased = row.biased(load(at), c);
        if (!all) biased = row.seen(c) ? biased : broadcast(-kInfinity);
        store(at, biased);
        peak = larger(biased, peak);
      }
      largest[r] = largest_of(peak);
    }
    float base[RunningTile::kRows];  // rows without visible keys so far are all -inf: 2^(-inf - 0) is 0, not NaN
    for (int r = 0; r < RunningTile::kRows; r += kLanes) {
      const Floats now = load(largest + r), from = now == -kInfinity ? Floats{} : now;
      store(base + r, from);
      store(running.shrink + r, exp2(load(running.largest + r) - from));
      store(running.largest + r, now);
    }
    for (int r = 0; r < kQueryRows; ++r) {
      Floats sum{};
      masks_.draw(r, b, h, query + r, key, columns);
      for (int64_t c = columns.first; c < columns.last; c += kLanes) {
        const Floats weight = exp2<T>(load(scores_ + r * kKeyBlock + c) - base[r]);
        store_beside(weights_ + (r * kKeyBlock + c) / kValues, masks_.of(r, c, weight));
        sum += weight;
      }
      running.sum[r] = running.sum[r] * running.shrink[r] + sum_of(sum);
    }
  }

  const Attention& shape_;
  TileMasks<kDropped> masks_;
  Width<T> width_;
  Rows<const T> q_, k_, v_;
  Scratch scratch_;
  Unit* queries_;
  float* sums_;
  Unit *keys_, *keys_by_dim_, *values_;
  float* scores_;
  Unit* weights_;
};

}  // namespace

int64_t attention_tasks(const Attention& shape) {
  return shape.batch * shape.heads * blocks_of(shape.queries, kQueryBlock);
}

namespace {

template <bool kDropped, typename T>
void run_forward(const Attention& shape, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
                 float* statistics, int64_t first, int64_t last) {
  Forward<T, kDropped> forward(shape, q, k, v);
  const int64_t blocks = blocks_of(shape.queries, kQueryBlock);
  for (int64_t task = first; task < last; ++task) {
    const int64_t head = task / blocks, query = balanced(task % blocks, blocks) * kQueryBlock;
    forward.run(head / shape.heads, head % shape.heads, query, out, statistics + (head * shape.queries + query) * 2);
  }
}

}  // namespace

template <typename T>
void attention_forward(const Attention& shape, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
                       float* statistics, int64_t first, int64_t last) {
  const auto run = shape.dropout.samples ? run_forward<true, T> : run_forward<false, T>;
  const FlushDenormals flush;
  run(shape, q, k, v, out, statistics, first, last);
}

#define MEGADS_INSTANTIATE(T)                                                                                     \
  template void attention_forward<T>(const Attention&, Rows<const T>, Rows<const T>, Rows<const T>, Rows<T>, float*, \
                                     int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
