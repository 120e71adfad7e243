#include "attention.h"

#include <algorithm>
#include <vector>

#include "matrix_product.h"

namespace megads {
namespace {

constexpr int64_t kQueryBlock = 96;
constexpr int64_t kKeyBlock = 64;

int64_t padded(int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

// Keys that a query sees: first..last, both included.
struct Visible {
  int64_t first, last;
};

Visible visible_keys(const Attention& shape, int64_t b, int64_t query) {
  const int64_t place = shape.places ? shape.places[query] : query;
  const int64_t start = shape.starts ? shape.starts[b * shape.queries + query] : 0;
  return {std::max<int64_t>(start, 0), std::min(place, shape.keys - 1)};
}

// From the first to the last key that any query of the block sees.
Visible visible_to_block(const Attention& shape, int64_t b, int64_t query, int64_t count) {
  Visible all{shape.keys, -1};
  for (int64_t r = 0; r < count; ++r) {
    const Visible keys = visible_keys(shape, b, query + r);
    if (keys.first > keys.last) continue;
    all = {std::min(all.first, keys.first), std::max(all.last, keys.last)};
  }
  return all;
}

// Rows of T as rows of fp32, padded with zeros to whole vectors and multiplied by a number.
template <typename T>
void pack(const T* from, int64_t row, int64_t rows, int64_t dim, float factor, float* to, int64_t to_row) {
  for (int64_t r = 0; r < rows; ++r, from += row, to += to_row) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d) * factor);
    if (d < dim) store(to + d, load_some(from + d, dim - d, 0.0f) * factor);
  }
}

// Packed rows [rows, dim] as columns [dim, kKeyBlock]; missing columns are zero.
void transpose(const float* from, int64_t row, int64_t rows, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; ++d) {
    for (int64_t r = 0; r < rows; ++r) to[d * kKeyBlock + r] = from[r * row + d];
    for (int64_t r = rows; r < kKeyBlock; ++r) to[d * kKeyBlock + r] = 0.0f;
  }
}

template <typename T>
void unpack(const float* from, int64_t from_row, int64_t rows, int64_t dim, float factor, T* to, int64_t row) {
  for (int64_t r = 0; r < rows; ++r, from += from_row, to += row) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d) * factor);
    if (d < dim) store_some(to + d, load(from + d) * factor, dim - d);
  }
}

// One row of a block of scores, whose first key is `key`: what the query sees of it and how it is biased.
struct ScoreRow {
  float slope;
  int32_t distance;     // from the query to the block's first key; not positive where the query sees any
  int32_t first, last;  // columns it sees, both included

  ScoreRow(const Attention& shape, int64_t b, int64_t h, int64_t query, int64_t key) {
    const Visible keys = visible_keys(shape, b, query);
    const int64_t place = shape.places ? shape.places[query] : query;
    slope = shape.slopes ? shape.slopes[h] : 0.0f;
    distance = int32_t(key - place);
    first = int32_t(std::max<int64_t>(keys.first - key, 0));
    last = int32_t(std::min<int64_t>(keys.last - key, kKeyBlock - 1));
  }

  bool sees_none() const { return first > last; }

  bool sees_all() const { return first == 0 && last == kKeyBlock - 1; }

  Floats biased(Floats scores, Ints columns) const {
    return scores + slope * __builtin_convertvector(columns + distance, Floats);
  }

  // All ones in the columns that the query sees.
  Ints seen(Ints columns) const { return (columns >= first) & (columns <= last); }
};

// Running softmax of one row of queries.
struct RunningRow {
  float largest = -kInfinity;
  float sum = 0.0f;
};

// Turns a row of scores into exp(score - largest so far); returns what earlier blocks' results are to be scaled by.
float soften(const ScoreRow& row, float* scores, RunningRow& running) {
  if (row.sees_none()) {
    std::fill(scores, scores + kKeyBlock, 0.0f);
    return 1.0f;
  }
  const Ints lanes = lane_numbers();
  Floats largest = broadcast(running.largest);
  for (int32_t c = 0; c < kKeyBlock; c += kLanes) {
    const Ints columns = lanes + c;
    Floats biased = row.biased(load(scores + c), columns);
    if (!row.sees_all()) biased = row.seen(columns) ? biased : broadcast(-kInfinity);
    store(scores + c, biased);
    largest = larger(biased, largest);
  }
  const float now = largest_of(largest);
  Floats sum{};
  for (int32_t c = 0; c < kKeyBlock; c += kLanes) {
    const Floats weight = exp(load(scores + c) - now);
    store(scores + c, weight);
    sum += weight;
  }
  const float shrink = running.largest == now ? 1.0f : exp(broadcast(running.largest - now))[0];
  running.largest = now;
  running.sum = running.sum * shrink + sum_of(sum);
  return shrink;
}

void scale_row(float* row, int64_t dim, float factor) {
  if (factor == 1.0f) return;
  for (int64_t d = 0; d < dim; d += kLanes) store(row + d, load(row + d) * factor);
}

// Scratch of one thread.
class Blocks {
 public:
  float* take(int64_t elements) {
    taken_.emplace_back(size_t(elements));
    return taken_.back().data();
  }

 private:
  std::vector<std::vector<float>> taken_;
};

}  // namespace

int64_t attention_tasks(const Attention& shape) {
  return shape.batch * shape.heads * ((shape.queries + kQueryBlock - 1) / kQueryBlock);
}

template <typename T>
void attention_forward(const Attention& shape, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
                       float* statistics, int64_t first, int64_t last) {
  const int64_t width = padded(shape.dim), per_head = (shape.queries + kQueryBlock - 1) / kQueryBlock;
  Blocks blocks;
  float* queries = blocks.take(kQueryBlock * width);
  float* sums = blocks.take(kQueryBlock * width);
  float* keys = blocks.take(kKeyBlock * width);
  float* keys_by_dim = blocks.take(shape.dim * kKeyBlock);
  float* values = blocks.take(kKeyBlock * width);
  float* scores = blocks.take(kQueryBlock * kKeyBlock);
  for (int64_t task = first; task < last; ++task) {
    const int64_t head = task / per_head, b = head / shape.heads, h = head % shape.heads;
    const int64_t key_head = h / shape.group(), query = task % per_head * kQueryBlock;
    const int64_t rows = std::min(kQueryBlock, shape.queries - query);
    pack(q.at(b, h, query), q.row, rows, shape.dim, shape.scale, queries, width);
    std::fill(sums, sums + rows * width, 0.0f);
    RunningRow running[kQueryBlock];
    const Visible all = visible_to_block(shape, b, query, rows);
    for (int64_t key = all.first; key <= all.last; key += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, shape.keys - key);
      pack(k.at(b, key_head, key), k.row, count, shape.dim, 1.0f, keys, width);
      transpose(keys, width, count, shape.dim, keys_by_dim);
      pack(v.at(b, key_head, key), v.row, count, shape.dim, 1.0f, values, width);
      matrix_product(rows, kKeyBlock, shape.dim, queries, width, 1, keys_by_dim, kKeyBlock, scores, kKeyBlock, false);
      for (int64_t r = 0; r < rows; ++r) {
        const float shrink = soften(ScoreRow(shape, b, h, query + r, key), scores + r * kKeyBlock, running[r]);
        scale_row(sums + r * width, width, shrink);
      }
      matrix_product(rows, width, count, scores, kKeyBlock, 1, values, width, sums, width, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float inverse = running[r].sum == 0.0f ? 0.0f : 1.0f / running[r].sum;
      unpack(sums + r * width, width, 1, shape.dim, inverse, out.at(b, h, query + r), out.row);
      float* of_row = statistics + ((head * shape.queries) + query + r) * 2;
      of_row[0] = running[r].largest;
      of_row[1] = inverse;
    }
  }
}

namespace {

// The backward pass of one head of keys: queries of one of its heads at a time, keys a block at a time.
template <typename T>
class HeadBackward {
 public:
  HeadBackward(const Attention& shape)
      : shape_(shape),
        width_(padded(shape.dim)),
        queries_(blocks_.take(shape.queries * width_)),
        grads_(blocks_.take(shape.queries * width_)),
        grad_queries_(blocks_.take(shape.queries * width_)),
        products_(blocks_.take(shape.queries)),
        keys_(blocks_.take(kKeyBlock * width_)),
        values_(blocks_.take(kKeyBlock * width_)),
        keys_by_dim_(blocks_.take(shape.dim * kKeyBlock)),
        values_by_dim_(blocks_.take(shape.dim * kKeyBlock)),
        grad_keys_(blocks_.take(shape.keys * width_)),
        grad_values_(blocks_.take(shape.keys * width_)),
        weights_(blocks_.take(kQueryBlock * kKeyBlock)),
        grad_scores_(blocks_.take(kQueryBlock * kKeyBlock)) {}

  void run(int64_t b, int64_t key_head, Rows<const T> grad, Rows<const T> q, Rows<const T> k, Rows<const T> v,
           Rows<const T> out, const float* statistics, Rows<T> grad_q, Rows<T> grad_k, Rows<T> grad_v) {
    std::fill(grad_keys_, grad_keys_ + shape_.keys * width_, 0.0f);
    std::fill(grad_values_, grad_values_ + shape_.keys * width_, 0.0f);
    for (int64_t h = key_head * shape_.group(); h < (key_head + 1) * shape_.group(); ++h) {
      pack(q.at(b, h, 0), q.row, shape_.queries, shape_.dim, shape_.scale, queries_, width_);
      pack(grad.at(b, h, 0), grad.row, shape_.queries, shape_.dim, 1.0f, grads_, width_);
      multiply_rows(out.at(b, h, 0), out.row);
      std::fill(grad_queries_, grad_queries_ + shape_.queries * width_, 0.0f);
      for (int64_t key = 0; key < shape_.keys; key += kKeyBlock) {
        const int64_t count = std::min(kKeyBlock, shape_.keys - key);
        pack(k.at(b, key_head, key), k.row, count, shape_.dim, 1.0f, keys_, width_);
        pack(v.at(b, key_head, key), v.row, count, shape_.dim, 1.0f, values_, width_);
        transpose(keys_, width_, count, shape_.dim, keys_by_dim_);
        transpose(values_, width_, count, shape_.dim, values_by_dim_);
        for (int64_t query = 0; query < shape_.queries; query += kQueryBlock)
          add_block(b, h, query, key, count, statistics + (b * shape_.heads + h) * shape_.queries * 2);
      }
      unpack(grad_queries_, width_, shape_.queries, shape_.dim, shape_.scale, grad_q.at(b, h, 0), grad_q.row);
    }
    unpack(grad_keys_, width_, shape_.keys, shape_.dim, 1.0f, grad_k.at(b, key_head, 0), grad_k.row);
    unpack(grad_values_, width_, shape_.keys, shape_.dim, 1.0f, grad_v.at(b, key_head, 0), grad_v.row);
  }

 private:
  // The product of each row of the output with its gradient, which is the sum of score gradients that softmax takes off.
  void multiply_rows(const T* out, int64_t row) {
    for (int64_t r = 0; r < shape_.queries; ++r) {
      const float* grad = grads_ + r * width_;
      Floats sum{};
      int64_t d = 0;
      for (; d + kLanes <= shape_.dim; d += kLanes) sum += load(out + r * row + d) * load(grad + d);
      if (d < shape_.dim) sum += load_some(out + r * row + d, shape_.dim - d, 0.0f) * load(grad + d);
      products_[r] = sum_of(sum);
    }
  }

  void add_block(int64_t b, int64_t h, int64_t query, int64_t key, int64_t count, const float* statistics) {
    const int64_t rows = std::min(kQueryBlock, shape_.queries - query);
    const Visible all = visible_to_block(shape_, b, query, rows);
    if (all.first >= key + count || all.last < key) return;
    const float *queries = queries_ + query * width_, *grads = grads_ + query * width_;
    const int64_t dim = shape_.dim;
    matrix_product(rows, kKeyBlock, dim, queries, width_, 1, keys_by_dim_, kKeyBlock, weights_, kKeyBlock, false);
    matrix_product(rows, kKeyBlock, dim, grads, width_, 1, values_by_dim_, kKeyBlock, grad_scores_, kKeyBlock, false);
    for (int64_t r = 0; r < rows; ++r)
      soften_again(ScoreRow(shape_, b, h, query + r, key), statistics + (query + r) * 2, products_[query + r],
                   weights_ + r * kKeyBlock, grad_scores_ + r * kKeyBlock);
    matrix_product(count, width_, rows, weights_, 1, kKeyBlock, grads, width_, grad_values_ + key * width_,
                   width_, true);
    matrix_product(count, width_, rows, grad_scores_, 1, kKeyBlock, queries, width_, grad_keys_ + key * width_,
                   width_, true);
    matrix_product(rows, width_, count, grad_scores_, kKeyBlock, 1, keys_, width_, grad_queries_ + query * width_,
                   width_, true);
  }

  // From scores and gradients of the weights to weights and gradients of the scores, of one row.
  static void soften_again(const ScoreRow& row, const float* statistics, float product, float* weights,
                           float* grad_scores) {
    const Ints lanes = lane_numbers();
    for (int32_t c = 0; c < kKeyBlock; c += kLanes) {
      const Ints columns = lanes + c;
      Floats weight = exp(row.biased(load(weights + c), columns) - statistics[0]) * statistics[1];
      Floats grad = weight * (load(grad_scores + c) - product);
      if (!row.sees_all()) {
        const Ints seen = row.seen(columns);
        weight = seen ? weight : Floats{};
        grad = seen ? grad : Floats{};
      }
      store(weights + c, weight);
      store(grad_scores + c, grad);
    }
  }

  const Attention& shape_;
  int64_t width_;
  Blocks blocks_;
  float *queries_, *grads_, *grad_queries_, *products_, *keys_, *values_, *keys_by_dim_, *values_by_dim_, *grad_keys_,
      *grad_values_, *weights_, *grad_scores_;
};

}  // namespace

template <typename T>
void attention_backward(const Attention& shape, Rows<const T> grad, Rows<const T> q, Rows<const T> k, Rows<const T> v,
                        Rows<const T> out, const float* statistics, Rows<T> grad_q, Rows<T> grad_k, Rows<T> grad_v,
                        int64_t first, int64_t last) {
  HeadBackward<T> backward(shape);
  for (int64_t head = first; head < last; ++head)
    backward.run(head / shape.key_heads, head % shape.key_heads, grad, q, k, v, out, statistics, grad_q, grad_k,
                 grad_v);
}

#define MEGADS_INSTANTIATE(T)                                                                                         \
  template void attention_forward<T>(const Attention&, Rows<const T>, Rows<const T>, Rows<const T>, Rows<T>, float*,  \
                                     int64_t, int64_t);                                                               \
  template void attention_backward<T>(const Attention&, Rows<const T>, Rows<const T>, Rows<const T>, Rows<const T>,   \
                                      Rows<const T>, const float*, Rows<T>, Rows<T>, Rows<T>, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
