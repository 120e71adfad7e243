// The mask of a dropout, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor dropout(const Tensor& x, const Tensor& keep, double scale, const std::optional<Tensor>& residual) {
  require(keep.scalar_type() == ScalarType::Byte && keep.numel() == x.numel(), "keep must be a uint8 of x's shape");
  if (residual) require_like(*residual, x, "residual must have shape and dtype of x");
  require_together({&x, &keep, residual ? &*residual : &x});
  Tensor out = torch::stable::empty_like(x);
  const Launch launch(x);
  launch(megads_cuda_dropout, number_of_type(x), x.numel(), data(x), data_of<uint8_t>(keep), scale, data(residual),
         data(out));
  return out;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) { library.impl("dropout", TORCH_BOX(&megads::bindings::dropout)); }
