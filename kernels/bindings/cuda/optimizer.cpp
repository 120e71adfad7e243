// Sums of squares and AdamW over flat optimizer state, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor square_sums(const Tensor& flat, const Tensor& bounds) {
  require(flat.scalar_type() == ScalarType::Float && bounds.scalar_type() == ScalarType::Long && bounds.dim() == 2 &&
              bounds.size(1) == 2,
          "flat must be fp32, bounds int64 [pieces, 2]");
  require_together({&flat, &bounds});
  const int64_t pieces = bounds.size(0);
  Tensor sums = torch::stable::new_empty(flat, std::vector<int64_t>{pieces}, ScalarType::Double);
  Tensor partial =
      torch::stable::new_empty(flat, std::vector<int64_t>{pieces, MEGADS_SQUARE_SUM_BLOCKS}, ScalarType::Double);
  const Launch launch(flat);
  launch(megads_cuda_square_sums, pieces, data_of<float>(flat), data_of<int64_t>(bounds), data_of<double>(partial),
         data_of<double>(sums));
  return sums;
}

void adamw_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& weights,
                const Tensor& grad, const Tensor& clip, double lr, double weight_decay, double beta1, double beta2,
                double eps, int64_t step) {
  for (const Tensor* x : {&master, &exp_avg, &exp_avg_sq, &grad})
    require(x->scalar_type() == ScalarType::Float && x->numel() == master.numel(),
            "master, moments and gradient must be fp32 of one length");
  require(weights.numel() == master.numel() && step >= 1, "weights must be as long as master, and steps count from 1");
  require(clip.scalar_type() == ScalarType::Float && clip.numel() == 1, "clip must be one fp32 number");
  require_together({&master, &exp_avg, &exp_avg_sq, &weights, &grad, &clip});
  const Launch launch(master);
  launch(megads_cuda_adamw, number_of_type(weights), master.numel(), data_of<float>(grad), data_of<float>(master),
         data_of<float>(exp_avg), data_of<float>(exp_avg_sq), data(weights), data_of<float>(clip), lr, weight_decay,
         beta1, beta2, eps, step);
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("square_sums", TORCH_BOX(&megads::bindings::square_sums));
  library.impl("adamw_step", TORCH_BOX(&megads::bindings::adamw_step));
}
