// Cross entropy over a part of the vocabulary, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

void require_logits(const Tensor& logits, const Tensor& labels, int64_t valid) {
  require(logits.dim() == 2, "logits must be [rows, columns]");
  require(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == logits.size(0),
          "labels must be int64 [rows]");
  require(0 <= valid && valid <= logits.size(1), "valid must be within the columns");
}

Tensor cross_entropy_forward(const Tensor& logits, const Tensor& labels, int64_t valid, int64_t start) {
  require_logits(logits, labels, valid);
  require_together({&logits, &labels});
  Tensor statistics = fp32_like(logits, {logits.size(0), 3});
  const Launch launch(logits);
  launch(megads_cuda_cross_entropy_forward, number_of_type(logits), logits.size(0), logits.size(1), valid, start,
         data(logits), data_of<int64_t>(labels), data_of<float>(statistics));
  return statistics;
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& largest, const Tensor& total,
                              const Tensor& grad, int64_t valid, int64_t start) {
  require_logits(logits, labels, valid);
  require_together({&logits, &labels, &largest, &total, &grad});
  for (const Tensor* x : {&largest, &total, &grad})
    require(x->scalar_type() == ScalarType::Float && x->dim() == 1 && x->size(0) == logits.size(0),
            "largest, total and grad must be fp32 [rows]");
  Tensor grad_logits = torch::stable::empty_like(logits);
  const Launch launch(logits);
  launch(megads_cuda_cross_entropy_backward, number_of_type(logits), logits.size(0), logits.size(1), valid, start,
         data(logits), data_of<int64_t>(labels), data_of<float>(largest), data_of<float>(total), data_of<float>(grad),
         data(grad_logits));
  return grad_logits;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("cross_entropy_forward", TORCH_BOX(&megads::bindings::cross_entropy_forward));
  library.impl("cross_entropy_backward", TORCH_BOX(&megads::bindings::cross_entropy_backward));
}
