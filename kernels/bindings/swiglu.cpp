// SwiGLU: operator schema, argument checks and threading.
#include "../cpu/swiglu.h"

#include "tensors.h"

namespace megads::bindings {
namespace {

void require_pairs(const Tensor& x) {
  require(x.dim() == 2 && x.is_contiguous() && x.size(1) % 2 == 0, "x must be a contiguous [rows, 2 * width]");
}

Tensor swiglu_forward(const Tensor& x) {
  require_pairs(x);
  Tensor out = torch::stable::new_empty(x, std::vector<int64_t>{x.size(0), x.size(1) / 2});
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, out.numel(), kElementsOfOneThread, [&](int64_t first, int64_t last) {
      megads::swiglu_forward<T>(data_of<T>(x), data_of<T>(out), first, last);
    });
  });
  return out;
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& x) {
  require_pairs(x);
  require(grad.dim() == 2 && grad.is_contiguous() && grad.scalar_type() == x.scalar_type() &&
              grad.size(0) == x.size(0) && 2 * grad.size(1) == x.size(1),
          "grad must be a contiguous [rows, width] of x's dtype");
  Tensor grad_x = torch::stable::empty_like(x);
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, grad.numel(), kElementsOfOneThread, [&](int64_t first, int64_t last) {
      megads::swiglu_backward<T>(data_of<T>(grad), data_of<T>(x), data_of<T>(grad_x), first, last);
    });
  });
  return grad_x;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("swiglu_forward(Tensor x) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("swiglu_forward", TORCH_BOX(&megads::bindings::swiglu_forward));
  library.impl("swiglu_backward", TORCH_BOX(&megads::bindings::swiglu_backward));
}
