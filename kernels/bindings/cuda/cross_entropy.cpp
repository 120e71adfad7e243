// Cross entropy over a vocabulary shard, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

void require_logits(const Tensor& logits, const Tensor& labels, int64_t valid) {
  require(logits.dim() == 2, "logits must be [rows, columns]");
  require(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == logits.size(0),
          "labels must be int64 [rows]");
  require(0 <= valid && valid <= logits.size(1), "valid must be within the columns");
}

void require_row_values(const Tensor& logits, const Tensor& x) {
  require(x.scalar_type() == ScalarType::Float && x.dim() == 1 && x.size(0) == logits.size(0),
          "largest, total and grad must be fp32 [rows]");
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

void write_gradient(const Launch& launch, const Tensor& logits, const Tensor& labels, const float* largest,
                    const float* total, const Tensor& grad, int64_t valid, int64_t start) {
  launch(megads_cuda_cross_entropy_backward, number_of_type(logits), logits.size(0), logits.size(1), valid, start,
         data(logits), data_of<int64_t>(labels), largest, total, data_of<float>(grad), data(logits));
}

void cross_entropy_gradient_(Tensor logits, const Tensor& labels, const Tensor& largest, const Tensor& total,
                             const Tensor& grad, int64_t valid, int64_t start) {
  require_logits(logits, labels, valid);
  require_together({&logits, &labels, &largest, &total, &grad});
  for (const Tensor* x : {&largest, &total, &grad}) require_row_values(logits, *x);
  write_gradient(Launch(logits), logits, labels, data_of<float>(largest), data_of<float>(total), grad, valid, start);
}

Tensor cross_entropy_loss_(Tensor logits, const Tensor& labels, const Tensor& grad, int64_t valid, int64_t start) {
  require_row_values(logits, grad);
  require_together({&logits, &grad});
  const Tensor statistics = cross_entropy_forward(logits, labels, valid, start);
  const Tensor of_kinds = torch::stable::contiguous(torch::stable::transpose(statistics, 0, 1));
  const float* largest = data_of<float>(of_kinds);
  write_gradient(Launch(logits), logits, labels, largest, largest + logits.size(0), grad, valid, start);
  return statistics;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("cross_entropy_forward", TORCH_BOX(&megads::bindings::cross_entropy_forward));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&megads::bindings::cross_entropy_gradient_));
  library.impl("cross_entropy_loss_", TORCH_BOX(&megads::bindings::cross_entropy_loss_));
}
