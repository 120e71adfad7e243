#include "attention_blocks.h"
#include "denormals.h"

namespace megads {
namespace {

// State of one thread. The queries of one head and the keys of one block are packed at a time.
template <typename T, bool kDropped>
class Backward {
  using Unit = typename Operand<T>::Unit;
  static constexpr int kValues = Operand<T>::kValues;
  static constexpr int64_t kTiles = kQueryBlock / kQueryRows;

 public:
  Backward(const Attention& shape, const AttentionBackward<T>& tensors, BackwardPart part)
      : shape_(shape), tensors_(tensors), masks_(shape), width_(shape.dim) {
    const bool queries = part != BackwardPart::keys, keys = part != BackwardPart::queries;
    const int64_t rows = rounded_up(keys ? shape.queries : kQueryBlock, kQueryBlock);
    const int64_t key_rows = part == BackwardPart::heads ? rounded_up(shape.keys, kKeyBlock) : kKeyBlock;
    queries_ = scratch_.take<Unit>(rows * width_.row);
    grads_ = scratch_.take<Unit>(rows * width_.row);
    products_ = scratch_.take<float>(rows);
    keys_ = scratch_.take<Unit>(kKeyBlock * width_.row);
    keys_by_dim_ = scratch_.take<Unit>(width_.row * kKeyBlock);
    values_by_dim_ = scratch_.take<Unit>(width_.row * kKeyBlock);
    scores_ = scratch_.take<float>(kQueryRows * kKeyBlock);
    grad_weights_ = scratch_.take<float>(kQueryRows * kKeyBlock);
    weights_ = scratch_.take<Unit>(kQueryBlock / kValues * kKeyBlock);
    grad_scores_ = scratch_.take<Unit>(kQueryBlock / kValues * kKeyBlock);
    if (queries) {
      grad_score_rows_ = scratch_.take<Unit>(kQueryRows * kKeyBlock / kValues);
      interleaved_keys_ = scratch_.take<Unit>(kKeyBlock / kValues * width_.numbers);
      grad_queries_ = scratch_.take<float>(rows * width_.numbers);
    }
    if (keys) {
      interleaved_queries_ = scratch_.take<Unit>(rows / kValues * width_.numbers);
      interleaved_grads_ = scratch_.take<Unit>(rows / kValues * width_.numbers);
      grad_keys_ = scratch_.take<float>(key_rows * width_.numbers);
      grad_values_ = scratch_.take<float>(key_rows * width_.numbers);
    }
  }

  // All gradients of one key head.
  void of_head(int64_t b, int64_t key_head) {
    clear(grad_keys_, rounded_up(shape_.keys, kKeyBlock));
    clear(grad_values_, rounded_up(shape_.keys, kKeyBlock));
    for (int64_t h = key_head * shape_.group(); h < (key_head + 1) * shape_.group(); ++h) {
      pack_queries(b, h, 0, shape_.queries);
      clear(grad_queries_, rounded_up(shape_.queries, kQueryBlock));
      for (int64_t key = 0; key < shape_.keys; key += kKeyBlock) {
        pack_keys(b, key_head, key);
        const int64_t at = key * width_.numbers;
        for (int64_t block = 0; block < int64_t(of_blocks_.size()); ++block)
          add(h, block, key, grad_queries_ + block * kQueryBlock * width_.numbers, grad_keys_ + at, grad_values_ + at);
      }
      write_queries(b, h, 0, shape_.queries);
    }
    write_keys(b, key_head, 0, shape_.keys);
  }

  // Gradient of one block of queries.
  void of_queries(int64_t b, int64_t h, int64_t query) {
    const int64_t rows = std::min(kQueryBlock, shape_.queries - query);
    pack_queries(b, h, query, rows);
    clear(grad_queries_, kQueryBlock);
    // Key blocks must start at the same keys as in the other partitions: the sums would otherwise round differently.
    const Visible all = of_blocks_[0];
    for (int64_t key = all.first / kKeyBlock * kKeyBlock; key <= all.last; key += kKeyBlock) {
      pack_keys(b, h / shape_.group(), key);
      add(h, 0, key, grad_queries_, nullptr, nullptr);
    }
    write_queries(b, h, query, rows);
  }

  // Gradients of one block of keys and values.
  void of_keys(int64_t b, int64_t key_head, int64_t key) {
    clear(grad_keys_, kKeyBlock);
    clear(grad_values_, kKeyBlock);
    pack_keys(b, key_head, key);
    for (int64_t h = key_head * shape_.group(); h < (key_head + 1) * shape_.group(); ++h) {
      if (packed_ != b * shape_.heads + h) pack_queries(b, h, 0, shape_.queries);
      for (int64_t block = 0; block < int64_t(of_blocks_.size()); ++block)
        add(h, block, key, nullptr, grad_keys_, grad_values_);
    }
    write_keys(b, key_head, key, std::min(kKeyBlock, shape_.keys - key));
  }

 private:
  void clear(float* rows, int64_t count) { std::fill(rows, rows + count * width_.numbers, 0.0f); }

  void pack_queries(int64_t b, int64_t h, int64_t query, int64_t rows) {
    const AttentionBackward<T>& x = tensors_;
    const int64_t all = rounded_up(rows, kQueryBlock), dim = shape_.dim;
    const T *q = x.q.at(b, h, query), *grad = x.grad.at(b, h, query), *out = x.out.at(b, h, query);
    pack_rows(q, x.q.row, rows, all, dim, queries_);
    pack_rows(grad, x.grad.row, rows, all, dim, grads_);
    if (interleaved_queries_) {
      pack_interleaved(q, x.q.row, rows, all, dim, interleaved_queries_);
      pack_interleaved(grad, x.grad.row, rows, all, dim, interleaved_grads_);
    }
    // Dot product of an output row and its gradient, which the backward pass of softmax subtracts.
    for (int64_t r = 0; r < rows; ++r) {
      Floats sum{};
      for (int64_t d = 0; d < dim; d += kLanes)
        sum += load_within(out + r * x.out.row, d, dim) * load_within(grad + r * x.grad.row, d, dim);
      products_[r] = sum_of(sum);
    }
    of_tiles_.clear();
    of_blocks_.assign(size_t(all / kQueryBlock), {shape_.keys, -1});
    for (int64_t r = 0; r < all; r += kQueryRows) {
      of_tiles_.push_back(visible_to(shape_, b, query + r, kQueryRows));
      of_blocks_[size_t(r / kQueryBlock)].add(of_tiles_.back());
    }
    b_ = b;
    query_ = query;
    statistics_ = x.statistics + (b * shape_.heads + h) * shape_.queries * 2;
    packed_ = b * shape_.heads + h;
  }

  void pack_keys(int64_t b, int64_t key_head, int64_t key) {
    const AttentionBackward<T>& x = tensors_;
    const int64_t count = std::min(kKeyBlock, shape_.keys - key), dim = shape_.dim;
    const T* k = x.k.at(b, key_head, key);
    pack_rows(x.v.at(b, key_head, key), x.v.row, count, kKeyBlock, dim, keys_);
    transpose(keys_, width_.row, values_by_dim_);
    pack_rows(k, x.k.row, count, kKeyBlock, dim, keys_);
    transpose(keys_, width_.row, keys_by_dim_);
    if (interleaved_keys_) pack_interleaved(k, x.k.row, count, kKeyBlock, dim, interleaved_keys_);
  }

  void write_queries(int64_t b, int64_t h, int64_t query, int64_t rows) {
    const Rows<T>& to = tensors_.grad_q;
    unpack(grad_queries_, width_.numbers, rows, shape_.dim, shape_.scale, to.at(b, h, query), to.row);
  }

  void write_keys(int64_t b, int64_t key_head, int64_t key, int64_t rows) {
    const Rows<T>&k = tensors_.grad_k, &v = tensors_.grad_v;
    unpack(grad_keys_, width_.numbers, rows, shape_.dim, shape_.scale, k.at(b, key_head, key), k.row);
    unpack(grad_values_, width_.numbers, rows, shape_.dim, masks_.scale(), v.at(b, key_head, key), v.row);
  }

  // Adds the contribution of a block of packed queries and a block of keys to the requested gradients (not null).
  void add(int64_t h, int64_t block, int64_t key, float* grad_queries, float* grad_keys, float* grad_values) {
    const Visible& seen = of_blocks_[size_t(block)];
    if (seen.none() || seen.first >= key + kKeyBlock || seen.last < key) return;
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      const Columns columns(of_tiles_[size_t(block * kTiles + tile)], key);
      columns_[tile][0] = columns.first;
      columns_[tile][1] = columns.last;
      if (grad_keys) hide(tile, columns);
      if (columns.none()) continue;
      weigh(h, block * kTiles + tile, key, columns, tile, grad_keys != nullptr);
      if (!grad_queries) continue;
      rows_product<kQueryRows>(width_.numbers, (columns.last - columns.first) / kValues,
                               grad_score_rows_ + columns.first / kValues, kKeyBlock / kValues, 1,
                               interleaved_keys_ + columns.first / kValues * width_.numbers, width_.numbers,
                               grad_queries + tile * kQueryRows * width_.numbers, width_.numbers, true);
    }
    if (grad_keys) add_to_keys(block, grad_keys, grad_values);
  }

  // Zeroes weights and score gradients of keys that no query of the tile attends to.
  void hide(int64_t tile, const Columns& columns) {
    for (int64_t r = tile * kQueryRows / kValues; r < (tile + 1) * kQueryRows / kValues; ++r)
      for (Unit* row : {weights_ + r * kKeyBlock, grad_scores_ + r * kKeyBlock}) {
        std::fill(row, row + columns.first, Unit{});
        std::fill(row + columns.last, row + kKeyBlock, Unit{});
      }
  }

  // Computes the weights and score gradients of a tile. Dropped weights are zero and the others unscaled; `write_keys`
  // scales.
  void weigh(int64_t h, int64_t packed_tile, int64_t key, const Columns& columns, int64_t tile, bool for_keys) {
    const int64_t row = packed_tile * kQueryRows, count = columns.last - columns.first;
    rows_product<kQueryRows>(count, width_.units, queries_ + row * width_.row, width_.row, 1,
                             keys_by_dim_ + columns.first, kKeyBlock, scores_ + columns.first, kKeyBlock, false);
    rows_product<kQueryRows>(count, width_.units, grads_ + row * width_.row, width_.row, 1,
                             values_by_dim_ + columns.first, kKeyBlock, grad_weights_ + columns.first, kKeyBlock,
                             false);
    for (int r = 0; r < kQueryRows; r += kValues) {
      for (int v = 0; v < kValues; ++v) masks_.draw(r + v, b_, h, query_ + row + r + v, key, columns);
      const SoftenedRow rows[2] = {softened(h, row, r, key, columns), softened(h, row, r + kValues - 1, key, columns)};
      for (int64_t c = columns.first; c < columns.last; c += kLanes) {
        Floats weights[kValues], grads[kValues];
        for (int v = 0; v < kValues; ++v) {
          rows[v].at(c, masks_.of(r + v, c, load(grad_weights_ + (r + v) * kKeyBlock + c)), weights[v], grads[v]);
          weights[v] = masks_.of(r + v, c, weights[v]);
        }
        if (grad_score_rows_)
          for (int v = 0; v < kValues; ++v)
            store_beside(grad_score_rows_ + ((r + v) * kKeyBlock + c) / kValues, grads[v]);
        if (!for_keys) continue;
        const int64_t at = (tile * kQueryRows + r) / kValues * kKeyBlock + c;
        store_interleaved(weights_ + at, weights);
        store_interleaved(grad_scores_ + at, grads);
      }
    }
  }

  // Computes weights and score gradients of one query from its q k^T and grad v^T.
  struct SoftenedRow {
    ScoreRow row;
    const float* scores;
    float largest, inverse, product, scale;
    bool all;

    // grad_weights: grad v^T, 0 for dropped probabilities.
    void at(int64_t c, Floats grad_weights, Floats& weight, Floats& grad) const {
      weight = exp2<T>(row.biased(load(scores + c), c) - largest) * inverse;
      grad = weight * (grad_weights * scale - product);
      if (all) return;
      const Ints seen = row.seen(c);
      weight = seen ? weight : Floats{};
      grad = seen ? grad : Floats{};
    }
  };

  SoftenedRow softened(int64_t h, int64_t first_row, int r, int64_t key, const Columns& columns) const {
    const int64_t query = query_ + first_row + r;
    const ScoreRow row(shape_, b_, h, query, key);
    const bool inside = query < shape_.queries;
    return {row,
            scores_ + r * kKeyBlock,
            inside ? statistics_[query * 2] : 0.0f,
            inside ? statistics_[query * 2 + 1] : 0.0f,
            inside ? products_[first_row + r] : 0.0f,
            masks_.scale(),
            row.sees(columns.first, columns.last)};
  }

  void add_to_keys(int64_t block, float* grad_keys, float* grad_values) {
    const int64_t at = block * kQueryBlock / kValues * width_.numbers;
    for (int64_t c = 0; c < kKeyBlock; c += kKeyRows) {
      int64_t first = kTiles, last = 0;
      for (int64_t tile = 0; tile < kTiles; ++tile) {
        if (columns_[tile][0] >= c + kKeyRows || columns_[tile][1] <= c) continue;
        first = std::min(first, tile);
        last = tile + 1;
      }
      if (first >= last) continue;
      const int64_t start = first * kQueryRows / kValues, inner = (last - first) * kQueryRows / kValues;
      const int64_t from = at + start * width_.numbers, to = c * width_.numbers;
      rows_product<kKeyRows>(width_.numbers, inner, weights_ + start * kKeyBlock + c, 1, kKeyBlock,
                             interleaved_grads_ + from, width_.numbers, grad_values + to, width_.numbers, true);
      rows_product<kKeyRows>(width_.numbers, inner, grad_scores_ + start * kKeyBlock + c, 1, kKeyBlock,
                             interleaved_queries_ + from, width_.numbers, grad_keys + to, width_.numbers, true);
    }
  }

  const Attention& shape_;
  const AttentionBackward<T>& tensors_;
  TileMasks<kDropped> masks_;
  Width<T> width_;
  Scratch scratch_;
  Unit *queries_, *grads_, *keys_, *keys_by_dim_, *values_by_dim_, *weights_, *grad_scores_;
  Unit *interleaved_queries_ = nullptr, *interleaved_grads_ = nullptr, *interleaved_keys_ = nullptr;
  Unit* grad_score_rows_ = nullptr;
  float *products_, *scores_, *grad_weights_;
  float *grad_queries_ = nullptr, *grad_keys_ = nullptr, *grad_values_ = nullptr;
  int64_t columns_[kTiles][2];

  // Packed queries: their batch and head, the first one, and the visible keys of their tiles and blocks.
  int64_t packed_ = -1, b_ = 0, query_ = 0;
  const float* statistics_ = nullptr;
  std::vector<Visible> of_tiles_, of_blocks_;
};

}  // namespace

bool backward_by_heads(const Attention& shape, int64_t threads) {
  // Separate query and key tasks take half as long again: two of seven GEMMs, and the weights, are computed twice.
  const int64_t heads = shape.batch * shape.key_heads;
  return 2 * blocks_of(heads, threads) * threads <= 3 * heads;
}

namespace {

int64_t tasks_of_head(const Attention& shape, BackwardPart part) {
  if (part == BackwardPart::heads) return 1;
  return part == BackwardPart::queries ? blocks_of(shape.queries, kQueryBlock) : blocks_of(shape.keys, kKeyBlock);
}

}  // namespace

int64_t attention_backward_tasks(const Attention& shape, BackwardPart part) {
  const int64_t heads = part == BackwardPart::queries ? shape.heads : shape.key_heads;
  return shape.batch * heads * tasks_of_head(shape, part);
}

namespace {

template <bool kDropped, typename T>
void run_backward(const Attention& shape, BackwardPart part, const AttentionBackward<T>& tensors, int64_t first,
                  int64_t last) {
  Backward<T, kDropped> backward(shape, tensors, part);
  const bool queries = part == BackwardPart::queries;
  const int64_t heads = queries ? shape.heads : shape.key_heads;
  const int64_t blocks = tasks_of_head(shape, part);
  for (int64_t task = first; task < last; ++task) {
    const int64_t b = task / blocks / heads, head = task / blocks % heads, block = balanced(task % blocks, blocks);
    if (part == BackwardPart::heads) backward.of_head(b, head);
    if (queries) backward.of_queries(b, head, block * kQueryBlock);
    if (part == BackwardPart::keys) backward.of_keys(b, head, block * kKeyBlock);
  }
}

}  // namespace

template <typename T>
void attention_backward(const Attention& shape, BackwardPart part, const AttentionBackward<T>& tensors, int64_t first,
                        int64_t last) {
  const auto run = shape.dropout.samples ? run_backward<true, T> : run_backward<false, T>;
  const FlushDenormals flush;
  run(shape, part, tensors, first, last);
}

#define MEGADS_INSTANTIATE(T)                                                                                      \
  template void attention_backward<T>(const Attention&, BackwardPart, const AttentionBackward<T>&, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
