// SwiGLU, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor swiglu_forward(const Tensor& x) {
  require(x.dim() == 2 && x.size(1) % 2 == 0, "x must be [rows, 2 * width]");
  require_together({&x});
  Tensor out = empty(x, {x.size(0), x.size(1) / 2});
  const Launch launch(x);
  launch(megads_cuda_swiglu_forward, number_of_type(x), out.numel(), data(x), data(out));
  return out;
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& x) {
  require(x.dim() == 2 && grad.dim() == 2 && grad.scalar_type() == x.scalar_type() && grad.size(0) == x.size(0) &&
              2 * grad.size(1) == x.size(1),
          "x must be [rows, 2 * width], grad [rows, width] of its dtype");
  require_together({&x, &grad});
  Tensor grad_x = torch::stable::empty_like(x);
  const Launch launch(x);
  launch(megads_cuda_swiglu_backward, number_of_type(x), grad.numel(), data(grad), data(x), data(grad_x));
  return grad_x;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("swiglu_forward", TORCH_BOX(&megads::bindings::swiglu_forward));
  library.impl("swiglu_backward", TORCH_BOX(&megads::bindings::swiglu_backward));
}
