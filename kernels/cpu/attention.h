// Causal FlashAttention (Dao et al. 2022): only the scores of one block of queries and keys are materialized at a time.
#pragma once

#include "philox.h"

namespace megads {

// A [batch, heads, rows, dim] tensor whose last dim is contiguous; strides in elements.
template <typename T>
struct Rows {
  T* data;
  int64_t batch, head, row;

  T* at(int64_t b, int64_t h, int64_t r) const { return data + b * batch + h * head + r * row; }
};

// Arguments of every call besides the tensors.
//   slopes: ALiBi slope of every head, or null.
//   places: position of every query among the keys, [queries]; null: the query's index.
//   starts: first visible key of every query, [batch, queries]; null: 0.
//   dropout: of probabilities, after the softmax; mask rows are indexed by place, elements by key.
// Keys and values have key_heads heads, each shared by heads / key_heads consecutive query heads (grouped-query
// attention, Ainslie et al. 2023). A query attends to the keys from its start to its place, inclusive. Without any, its
// output and gradients are zero.
struct Attention {
  int64_t batch, heads, key_heads, queries, keys, dim;
  float scale;
  const float* slopes;
  const int64_t* places;
  const int64_t* starts;
  DropoutMask dropout;

  int64_t place(int64_t query) const { return places ? places[query] : query; }
  int64_t group() const { return heads / key_heads; }
};

// Number of forward tasks: one per block of queries. They are independent of each other.
int64_t attention_tasks(const Attention& shape);

// Runs tasks first..last-1. statistics, [batch, heads, queries, 2]: each row's largest biased score times log2(e), and
// 1 / sum of exp(score - largest).
template <typename T>
void attention_forward(const Attention& shape, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
                       float* statistics, int64_t first, int64_t last);

// Inputs and outputs of the backward pass.
template <typename T>
struct AttentionBackward {
  Rows<const T> grad, q, k, v, out;
  const float* statistics;
  Rows<T> grad_q, grad_k, grad_v;
};

// Partition of the backward pass into independent tasks: by key heads, each with all its gradients, or, if there are
// too few heads for all threads, first by blocks of queries and then by blocks of keys, which computes scores and
// weights twice. The summation order is the same either way: results are bitwise independent of the number of threads.
enum class BackwardPart { heads, queries, keys };

bool backward_by_heads(const Attention& shape, int64_t threads);

int64_t attention_backward_tasks(const Attention& shape, BackwardPart part);

// Runs tasks first..last-1 of a part. Scores are recomputed, and normalized by the statistics.
template <typename T>
void attention_backward(const Attention& shape, BackwardPart part, const AttentionBackward<T>& tensors, int64_t first,
                        int64_t last);

}  // namespace megads
