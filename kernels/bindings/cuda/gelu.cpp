// GELU, also with a fused bias, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor gelu_forward(const Tensor& x) {
  require_together({&x});
  Tensor out = torch::stable::empty_like(x);
  const Launch launch(x);
  launch(megads_cuda_gelu_forward, number_of_type(x), int64_t(1), x.numel(), data(x), nullptr, data(out));
  return out;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x) {
  require_together({&grad, &x});
  require_like(grad, x, "grad must have shape and dtype of x");
  Tensor grad_x = torch::stable::empty_like(x);
  const Launch launch(x);
  launch(megads_cuda_gelu_backward, number_of_type(x), int64_t(1), x.numel(), data(grad), data(x), nullptr,
         data(grad_x), nullptr, nullptr);
  return grad_x;
}

void require_rows_and_bias(const Tensor& x, const Tensor& bias) {
  require(x.dim() == 2 && bias.dim() == 1 && bias.size(0) == x.size(1) && bias.scalar_type() == x.scalar_type(),
          "x must be [rows, width], bias [width] of its dtype");
}

Tensor bias_gelu_forward(const Tensor& x, const Tensor& bias) {
  require_rows_and_bias(x, bias);
  require_together({&x, &bias});
  Tensor out = torch::stable::empty_like(x);
  const Launch launch(x);
  launch(megads_cuda_gelu_forward, number_of_type(x), x.size(0), x.size(1), data(x), data(bias), data(out));
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  require_rows_and_bias(x, bias);
  require_together({&grad, &x, &bias});
  require_like(grad, x, "grad must have shape and dtype of x");
  Tensor grad_x = torch::stable::empty_like(x), grad_bias = torch::stable::empty_like(bias);
  Tensor partial = fp32_like(x, {megads_cuda_gelu_partials(x.size(0), x.size(1)), x.size(1)});
  const Launch launch(x);
  launch(megads_cuda_gelu_backward, number_of_type(x), x.size(0), x.size(1), data(grad), data(x), data(bias),
         data(grad_x), data_of<float>(partial), data(grad_bias));
  return {grad_x, grad_bias};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("gelu_forward", TORCH_BOX(&megads::bindings::gelu_forward));
  library.impl("gelu_backward", TORCH_BOX(&megads::bindings::gelu_backward));
  library.impl("bias_gelu_forward", TORCH_BOX(&megads::bindings::bias_gelu_forward));
  library.impl("bias_gelu_backward", TORCH_BOX(&megads::bindings::bias_gelu_backward));
}
