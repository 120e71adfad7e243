// Causal attention that never holds the scores of more than one block of queries and keys (Dao et al. 2022).
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

// What every call needs beside the tensors.
//   slopes: ALiBi slope of every head, or null.
//   places: place of every query among the keys, [queries]; null: its own number.
//   starts: first key that a query sees, [batch, queries]; null: 0.
//   dropout: of probabilities, behind the softmax; its rows are those of places, its elements keys.
// Keys and values have key_heads heads, each shared by heads / key_heads query heads beside each other (Ainslie et al.
// 2023, grouped-query attention).
// A query sees the keys from its start to its place. One that sees none has output and gradients zero.
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

// Tasks of the forward pass: one for each block of queries. Each is independent of the others.
int64_t attention_tasks(const Attention& shape);

// Runs tasks first..last-1. statistics, [batch, heads, queries, 2]: each row's largest biased score times log2(e), and
// 1 / sum of exp(score - largest).
template <typename T>
void attention_forward(const Attention& shape, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out,
                       float* statistics, int64_t first, int64_t last);

// What the backward pass reads, and what it writes.
template <typename T>
struct AttentionBackward {
  Rows<const T> grad, q, k, v, out;
  const float* statistics;
  Rows<T> grad_q, grad_k, grad_v;
};

// The backward pass in tasks independent of each other. Either by heads of keys, each with all its gradients, or, where
// heads are too few for all threads, first of blocks of queries and then of blocks of keys, for which scores and
// weights are computed twice. Every sum has the same order either way: no bit depends on the number of threads.
enum class BackwardPart { heads, queries, keys };

bool backward_by_heads(const Attention& shape, int64_t threads);

int64_t attention_backward_tasks(const Attention& shape, BackwardPart part);

// Runs tasks first..last-1 of a part. Scores are computed again from the statistics.
template <typename T>
void attention_backward(const Attention& shape, BackwardPart part, const AttentionBackward<T>& tensors, int64_t first,
                        int64_t last);

}  // namespace megads
