// AdamW: operator schema, argument checks and threading.
#include "../cpu/adamw.h"

#include <cmath>

#include "tensors.h"

namespace megads::bindings {
namespace {

void adamw_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& weights,
                const Tensor& grad, const Tensor& clip, double lr, double weight_decay, double beta1, double beta2,
                double eps, int64_t step) {
  for (const Tensor* x : {&master, &exp_avg, &exp_avg_sq, &grad})
    require(x->scalar_type() == ScalarType::Float && x->is_contiguous() && x->numel() == master.numel(),
            "master, moments and grad must be contiguous fp32 of one length");
  require(weights.is_contiguous() && weights.numel() == master.numel(), "weights must be contiguous, as long as master");
  require(clip.scalar_type() == ScalarType::Float && clip.numel() == 1, "clip must be one fp32 number");
  require(step > 0, "step counts from 1");
  const float scale = *data_of<float>(clip);
  if (!std::isfinite(scale)) return;
  const megads::AdamWFactors factors = {
      scale,
      float(lr * weight_decay),
      float(1.0 - beta1),
      float(beta2),
      float(1.0 - beta2),
      float(lr / (1.0 - std::pow(beta1, double(step)))),
      float(std::sqrt(1.0 - std::pow(beta2, double(step)))),
      float(eps),
  };
  with_type_of(weights, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, master.numel(), kElementsOfOneThread, [&](int64_t first, int64_t last) {
      megads::adamw<T>(data_of<float>(grad), data_of<float>(master), data_of<float>(exp_avg),
                       data_of<float>(exp_avg_sq), data_of<T>(weights), factors, first, last);
    });
  });
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def(
      "adamw_step(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) weights, Tensor grad, "
      "Tensor clip, float lr, float weight_decay, float beta1, float beta2, float eps, int step) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("adamw_step", TORCH_BOX(&megads::bindings::adamw_step));
}
