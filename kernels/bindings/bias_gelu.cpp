// GELU with a bias: operator schema, argument checks and threading.
#include "../cpu/bias_gelu.h"

#include "sums.h"

namespace megads::bindings {
namespace {

void require_rows_and_bias(const Tensor& x, const Tensor& bias) {
  require(x.dim() == 2 && x.is_contiguous(), "x must be a contiguous [rows, width]");
  require(bias.dim() == 1 && bias.size(0) == x.size(1) && bias.is_contiguous() &&
              bias.scalar_type() == x.scalar_type(), "bias must be a contiguous [width] of x's dtype");
}

int64_t grain(int64_t rows, int64_t width) {
  return std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, rows * width));
}

Tensor bias_gelu_forward(const Tensor& x, const Tensor& bias) {
  require_rows_and_bias(x, bias);
  Tensor out = torch::stable::empty_like(x);
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, x.size(0), grain(1, x.size(1)), [&](int64_t first, int64_t last) {
      megads::bias_gelu_forward<T>(x.size(1), data_of<T>(x), data_of<T>(bias), data_of<T>(out), first, last);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  require_rows_and_bias(x, bias);
  require_like(grad, x, "grad must have shape and dtype of x");
  require(grad.is_contiguous(), "grad must be contiguous");
  const int64_t rows = x.size(0), width = x.size(1), blocks = row_blocks(rows);
  Tensor grad_x = torch::stable::empty_like(x), grad_bias = torch::stable::empty_like(bias);
  Tensor partial = fp32_like(x, {blocks, 1, width});
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, blocks, grain(rows_of_block(rows), width), [&](int64_t first, int64_t last) {
      megads::bias_gelu_backward<T>(rows, width, data_of<T>(grad), data_of<T>(x), data_of<T>(bias),
                                    data_of<T>(grad_x), data_of<float>(partial), first, last);
    });
    add_blocks_of<T>(partial, 0, grad_bias);
  });
  return {grad_x, grad_bias};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("bias_gelu_forward(Tensor x, Tensor bias) -> Tensor");
  library.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("bias_gelu_forward", TORCH_BOX(&megads::bindings::bias_gelu_forward));
  library.impl("bias_gelu_backward", TORCH_BOX(&megads::bindings::bias_gelu_backward));
}
