// Cross entropy of rows of logits, and its gradient in their place; no copy of them in fp32 or otherwise.
#pragma once

#include "vector.h"

namespace megads {

// Rows of logits [rows, columns], of which the first `valid` columns count.
//   labels: of every row; column label - start, another rank's where that is not in 0..valid-1.
template <typename T>
struct LogitRows {
  T* logits;
  const int64_t* labels;
  int64_t columns, valid, start;
};

// Of rows first..last-1, statistics [rows, 3]: the largest logit, the sum of exp(logit - largest), and the logit of the
// label, 0 where the label is another rank's.
template <typename T>
void cross_entropy_forward(const LogitRows<T>& rows, float* statistics, int64_t first, int64_t last);

// Writes (softmax - one at the label) * grad of the row over the logits of rows first..last-1; 0 in columns from
// `valid` on. largest, total: of the row over the whole vocabulary.
template <typename T>
void cross_entropy_gradient(const LogitRows<T>& rows, const float* largest, const float* total, const float* grad,
                            int64_t first, int64_t last);

// Both, where the rows are the whole vocabulary: a row is in the second cache when it is read again.
template <typename T>
void cross_entropy_loss(const LogitRows<T>& rows, const float* grad, float* statistics, int64_t first, int64_t last);

}  // namespace megads
