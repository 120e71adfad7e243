// Cross entropy over a vocabulary shard: operator schema, argument checks and threading.
#include "../cpu/cross_entropy.h"

#include "tensors.h"

namespace megads::bindings {
namespace {

void require_rows(const Tensor& logits, const Tensor& labels, int64_t valid) {
  require(logits.dim() == 2 && logits.is_contiguous(), "logits must be a contiguous [rows, columns]");
  require(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
              labels.is_contiguous(), "labels must be a contiguous int64 [rows]");
  require(0 <= valid && valid <= logits.size(1), "valid must be within the columns");
}

void require_row_values(const Tensor& logits, const Tensor& x) {
  require(x.scalar_type() == ScalarType::Float && x.dim() == 1 && x.size(0) == logits.size(0) && x.is_contiguous(),
          "largest, total and grad must be contiguous fp32 [rows]");
}

// Calls body(rows, first, last) for ranges of rows, on all threads.
template <typename Body>
void over_rows(const Tensor& logits, const Tensor& labels, int64_t valid, int64_t start, Body body) {
  const int64_t columns = logits.size(1), grain = kElementsOfOneThread / std::max<int64_t>(1, columns);
  with_type_of(logits, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const LogitRows<T> rows{data_of<T>(logits), data_of<int64_t>(labels), columns, valid, start};
    torch::stable::parallel_for(0, logits.size(0), std::max<int64_t>(1, grain),
                                [&](int64_t first, int64_t last) { body(rows, first, last); });
  });
}

Tensor cross_entropy_forward(const Tensor& logits, const Tensor& labels, int64_t valid, int64_t start) {
  require_rows(logits, labels, valid);
  Tensor statistics = fp32_like(logits, {logits.size(0), 3});
  over_rows(logits, labels, valid, start, [&](const auto& rows, int64_t first, int64_t last) {
    megads::cross_entropy_forward(rows, data_of<float>(statistics), first, last);
  });
  return statistics;
}

void cross_entropy_gradient_(Tensor logits, const Tensor& labels, const Tensor& largest, const Tensor& total,
                             const Tensor& grad, int64_t valid, int64_t start) {
  require_rows(logits, labels, valid);
  for (const Tensor* x : {&largest, &total, &grad}) require_row_values(logits, *x);
  over_rows(logits, labels, valid, start, [&](const auto& rows, int64_t first, int64_t last) {
    megads::cross_entropy_gradient(rows, data_of<float>(largest), data_of<float>(total), data_of<float>(grad), first,
                                   last);
  });
}

Tensor cross_entropy_loss_(Tensor logits, const Tensor& labels, const Tensor& grad, int64_t valid, int64_t start) {
  require_rows(logits, labels, valid);
  require_row_values(logits, grad);
  Tensor statistics = fp32_like(logits, {logits.size(0), 3});
  over_rows(logits, labels, valid, start, [&](const auto& rows, int64_t first, int64_t last) {
    megads::cross_entropy_loss(rows, data_of<float>(grad), data_of<float>(statistics), first, last);
  });
  return statistics;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("cross_entropy_forward(Tensor logits, Tensor labels, int valid, int start) -> Tensor");
  library.def(
      "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor largest, Tensor total, Tensor grad, int valid, "
      "int start) -> ()");
  library.def(
      "cross_entropy_loss_(Tensor(a!) logits, Tensor labels, Tensor grad, int valid, int start) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("cross_entropy_forward", TORCH_BOX(&megads::bindings::cross_entropy_forward));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&megads::bindings::cross_entropy_gradient_));
  library.impl("cross_entropy_loss_", TORCH_BOX(&megads::bindings::cross_entropy_loss_));
}
