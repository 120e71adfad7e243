// Cross entropy of rows of logits, read once forward and once backward; no copy of them in fp32.
#pragma once

#include "vector.h"

namespace megads {

// Of rows first..last-1 of logits [rows, columns], of which the first `valid` columns count:
//   statistics [rows, 3]: the largest logit, the sum of exp(logit - largest), and the logit of the label, 0 where the
//   label is not among this part of the vocabulary, label - start not in 0..valid-1.
template <typename T>
void cross_entropy_forward(const T* logits, const int64_t* labels, int64_t columns, int64_t valid, int64_t start,
                           float* statistics, int64_t first, int64_t last);

// grad_logits [rows, columns] = (softmax - one at the label) * grad of the row; 0 in columns from `valid` on.
//   largest, total: of the row over the whole vocabulary.
template <typename T>
void cross_entropy_backward(const T* logits, const int64_t* labels, const float* largest, const float* total,
                            const float* grad, int64_t columns, int64_t valid, int64_t start, T* grad_logits,
                            int64_t first, int64_t last);

}  // namespace megads
