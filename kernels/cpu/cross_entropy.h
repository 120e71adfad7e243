// Cross entropy of rows of logits, with the gradient computed in place; logits are never copied, in fp32 or otherwise.
#pragma once

#include "vector.h"

namespace megads {

// Rows of logits [rows, columns], of which the first `valid` columns count.
//   labels: label of every row, at column label - start; it is another rank's if that is not in 0..valid-1.
template <typename T>
struct LogitRows {
  T* logits;
  const int64_t* labels;
  int64_t columns, valid, start;
};

// Writes statistics, [rows, 3], of rows first..last-1: the largest logit, the sum of exp(logit - largest), and the
// logit of the label, 0 if the label is another rank's.
template <typename T>
void cross_entropy_forward(const LogitRows<T>& rows, float* statistics, int64_t first, int64_t last);

// Overwrites the logits of rows first..last-1 with (softmax - onehot(label)) * grad of the row; 0 in columns from
// `valid` on. largest, total: statistics of the row over the whole vocabulary.
template <typename T>
void cross_entropy_gradient(const LogitRows<T>& rows, const float* largest, const float* total, const float* grad,
                            int64_t first, int64_t last);

// Both, for an unsharded vocabulary: a row is still in the L2 cache when it is read again.
template <typename T>
void cross_entropy_loss(const LogitRows<T>& rows, const float* grad, float* statistics, int64_t first, int64_t last);

}  // namespace megads
