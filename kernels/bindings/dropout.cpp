// Dropout of hidden states: operator schema, argument checks and threading.
#include "../cpu/dropout.h"

#include <algorithm>

#include "dropout_mask.h"

namespace megads::bindings {
namespace {

Tensor dropout(const Tensor& x, const std::optional<Tensor>& residual, const std::optional<Tensor>& places,
               const Tensor& samples, int64_t key, int64_t threshold) {
  require(x.dim() == 3 && x.is_contiguous() && (!residual || residual->is_contiguous()),
          "x must be [batch, tokens, width], x and residual contiguous");
  if (residual) require_like(*residual, x, "residual must have shape and dtype of x");
  if (places)
    require(places->scalar_type() == ScalarType::Long && places->dim() == 1 && places->size(0) == x.size(1) &&
                places->is_contiguous(), "places must be a contiguous int64 [tokens]");
  const HiddenDropout shape{x.size(1), x.size(2), optional_data<int64_t>(places),
                            mask_of(samples, x.size(0), key, threshold, 0)};
  Tensor out = torch::stable::empty_like(x);
  const int64_t grain = std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, shape.width));
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, x.size(0) * x.size(1), grain, [&](int64_t first, int64_t last) {
      megads::dropout<T>(shape, data_of<T>(x), residual ? data_of<T>(*residual) : nullptr, data_of<T>(out), first,
                         last);
    });
  });
  return out;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def(
      "dropout(Tensor x, Tensor? residual, Tensor? places, Tensor samples, int key, int threshold) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) { library.impl("dropout", TORCH_BOX(&megads::bindings::dropout)); }
