// The mask of a dropout: schema, checks and threads.
#include "../cpu/dropout.h"

#include "tensors.h"

namespace megads::bindings {
namespace {

Tensor dropout(const Tensor& x, const Tensor& keep, double scale, const std::optional<Tensor>& residual) {
  require(x.is_contiguous() && keep.is_contiguous() && (!residual || residual->is_contiguous()),
          "x, keep and residual must be contiguous");
  require(keep.scalar_type() == ScalarType::Byte && keep.numel() == x.numel(), "keep must be a uint8 of x's shape");
  if (residual) require_like(*residual, x, "residual must have shape and dtype of x");
  Tensor out = torch::stable::empty_like(x);
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, x.numel(), kElementsOfOneThread, [&](int64_t first, int64_t last) {
      megads::dropout<T>(data_of<T>(x), data_of<uint8_t>(keep), float(scale), residual ? data_of<T>(*residual) : nullptr,
                         data_of<T>(out), first, last);
    });
  });
  return out;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("dropout(Tensor x, Tensor keep, float scale, Tensor? residual) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) { library.impl("dropout", TORCH_BOX(&megads::bindings::dropout)); }
