// LayerNorm and RMSNorm, also with a fused residual addition, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

void require_columns(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  require(x.dim() == 2, "x must be [rows, width]");
  for (const Tensor* of_columns : {&weight, bias ? &*bias : &weight}) {
    require(of_columns->dim() == 1 && of_columns->size(0) == x.size(1) && of_columns->scalar_type() == x.scalar_type(),
            "weight and bias must be [width] of x's dtype");
    require_together({&x, of_columns});
  }
}

std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                        double eps, bool centred) {
  require_columns(x, weight, bias);
  Tensor out = torch::stable::empty_like(x), statistics = fp32_like(x, {x.size(0), 2});
  const Launch launch(x);
  launch(megads_cuda_norm_forward, number_of_type(x), x.size(0), x.size(1), eps, int64_t(centred), data(x), nullptr,
         nullptr, 1.0, data(weight), data(bias), nullptr, data(out), data_of<float>(statistics));
  return {out, statistics};
}

std::tuple<Tensor, Tensor, Tensor> add_norm_forward(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    const std::optional<Tensor>& bias, double eps, bool centred) {
  require_columns(x, weight, bias);
  require_like(residual, x, "residual must have shape and dtype of x");
  require_together({&x, &residual});
  Tensor out = torch::stable::empty_like(x), added = torch::stable::empty_like(x);
  Tensor statistics = fp32_like(x, {x.size(0), 2});
  const Launch launch(x);
  launch(megads_cuda_norm_forward, number_of_type(x), x.size(0), x.size(1), eps, int64_t(centred), data(x),
         data(residual), nullptr, 1.0, data(weight), data(bias), data(added), data(out), data_of<float>(statistics));
  return {out, added, statistics};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_added,
                                                 const Tensor& x, const Tensor& weight, const Tensor& statistics,
                                                 bool centred, bool has_bias) {
  require_columns(x, weight, std::nullopt);
  for (const Tensor* like_x : {&grad, grad_added ? &*grad_added : &grad}) {
    require_like(*like_x, x, "gradients must have shape and dtype of x");
    require_together({&x, like_x});
  }
  require(statistics.scalar_type() == ScalarType::Float && statistics.numel() == 2 * x.size(0),
          "statistics must be the forward pass's");
  const int64_t rows = x.size(0), width = x.size(1);
  Tensor grad_x = torch::stable::empty_like(x), grad_weight = torch::stable::empty_like(weight);
  Tensor grad_bias = empty(weight, {has_bias ? width : 0});
  Tensor partial = fp32_like(x, {megads_cuda_norm_partials(rows, width), 2, width});
  const Launch launch(x);
  launch(megads_cuda_norm_backward, number_of_type(x), rows, width, int64_t(centred), data(grad), data(grad_added),
         data(x), data(weight), data_of<float>(statistics), nullptr, 1.0, data(grad_x), nullptr,
         data_of<float>(partial), data(grad_weight), has_bias ? data(grad_bias) : nullptr);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("norm_forward", TORCH_BOX(&megads::bindings::norm_forward));
  library.impl("add_norm_forward", TORCH_BOX(&megads::bindings::add_norm_forward));
  library.impl("norm_backward", TORCH_BOX(&megads::bindings::norm_backward));
}
