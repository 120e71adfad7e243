// GELU: operator schema, argument checks and threading.
#include "../cpu/gelu.h"

#include "tensors.h"

namespace megads::bindings {
namespace {

Tensor gelu_forward(const Tensor& x) {
  require(x.is_contiguous(), "x must be contiguous");
  Tensor out = torch::stable::empty_like(x);
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, x.numel(), kElementsOfOneThread, [&](int64_t first, int64_t last) {
      megads::gelu_forward<T>(data_of<T>(x), data_of<T>(out), first, last);
    });
  });
  return out;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x) {
  require(x.is_contiguous() && grad.is_contiguous(), "x and grad must be contiguous");
  require_like(grad, x, "grad must have shape and dtype of x");
  Tensor grad_x = torch::stable::empty_like(x);
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, x.numel(), kElementsOfOneThread, [&](int64_t first, int64_t last) {
      megads::gelu_backward<T>(data_of<T>(grad), data_of<T>(x), data_of<T>(grad_x), first, last);
    });
  });
  return grad_x;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("gelu_forward(Tensor x) -> Tensor");
  library.def("gelu_backward(Tensor grad, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("gelu_forward", TORCH_BOX(&megads::bindings::gelu_forward));
  library.impl("gelu_backward", TORCH_BOX(&megads::bindings::gelu_backward));
}
