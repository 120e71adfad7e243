// Dropout of hidden states, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor dropout(const Tensor& x, const std::optional<Tensor>& residual, const std::optional<Tensor>& places,
               const Tensor& samples, int64_t key, int64_t threshold) {
  require(x.dim() == 3, "x must be [batch, tokens, width]");
  if (residual) require_like(*residual, x, "residual must have shape and dtype of x");
  require(!places || (places->scalar_type() == ScalarType::Long && places->numel() == x.size(1)),
          "places must be int64 [tokens]");
  require_mask(samples, x.size(0), threshold);
  require_together({&x, &samples, residual ? &*residual : &x, places ? &*places : &x});
  Tensor out = torch::stable::empty_like(x);
  const Launch launch(x);
  launch(megads_cuda_dropout, number_of_type(x), x.size(0), x.size(1), x.size(2), data(x), data(residual),
         optional_data<int64_t>(places), data_of<int64_t>(samples), key, threshold, data(out));
  return out;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) { library.impl("dropout", TORCH_BOX(&megads::bindings::dropout)); }
