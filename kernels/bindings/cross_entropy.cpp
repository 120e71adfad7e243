// Cross entropy over a part of the vocabulary: schema, checks and threads.
#include "../cpu/cross_entropy.h"

#include "tensors.h"

namespace megads::bindings {
namespace {

int64_t rows_grain(int64_t columns) { return std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, columns)); }

Tensor cross_entropy_forward(const Tensor& logits, const Tensor& labels, int64_t valid, int64_t start) {
  require(logits.dim() == 2 && logits.is_contiguous(), "logits must be a contiguous [rows, columns]");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  require(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == rows &&
              labels.is_contiguous(), "labels must be a contiguous int64 [rows]");
  require(0 <= valid && valid <= columns, "valid must be within the columns");
  Tensor statistics = fp32_like(logits, {rows, 3});
  with_type_of(logits, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, rows, rows_grain(columns), [&](int64_t first, int64_t last) {
      megads::cross_entropy_forward<T>(data_of<T>(logits), data_of<int64_t>(labels), columns, valid, start,
                                       data_of<float>(statistics), first, last);
    });
  });
  return statistics;
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& largest, const Tensor& total,
                              const Tensor& grad, int64_t valid, int64_t start) {
  require(logits.dim() == 2 && logits.is_contiguous(), "logits must be a contiguous [rows, columns]");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  for (const Tensor* x : {&largest, &total, &grad})
    require(x->scalar_type() == ScalarType::Float && x->dim() == 1 && x->size(0) == rows && x->is_contiguous(),
            "largest, total and grad must be contiguous fp32 [rows]");
  require(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == rows &&
              labels.is_contiguous(), "labels must be a contiguous int64 [rows]");
  require(0 <= valid && valid <= columns, "valid must be within the columns");
  Tensor grad_logits = torch::stable::empty_like(logits);
  with_type_of(logits, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, rows, rows_grain(columns), [&](int64_t first, int64_t last) {
      megads::cross_entropy_backward<T>(data_of<T>(logits), data_of<int64_t>(labels), data_of<float>(largest),
                                        data_of<float>(total), data_of<float>(grad), columns, valid, start,
                                        data_of<T>(grad_logits), first, last);
    });
  });
  return grad_logits;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("cross_entropy_forward(Tensor logits, Tensor labels, int valid, int start) -> Tensor");
  library.def(
      "cross_entropy_backward(Tensor logits, Tensor labels, Tensor largest, Tensor total, Tensor grad, int valid, "
      "int start) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("cross_entropy_forward", TORCH_BOX(&megads::bindings::cross_entropy_forward));
  library.impl("cross_entropy_backward", TORCH_BOX(&megads::bindings::cross_entropy_backward));
}
