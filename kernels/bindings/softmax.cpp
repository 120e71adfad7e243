// Softmax of attention scores: operator schema, argument checks and threading.
#include "../cpu/softmax.h"

#include <algorithm>

#include "dropout_mask.h"
#include "visible.h"

namespace megads::bindings {
namespace {

MaskedSoftmax softmax_of(const Tensor& scores, double scale, const std::optional<Tensor>& slopes,
                         const std::optional<Tensor>& places, const std::optional<Tensor>& starts) {
  require(scores.dim() == 4 && scores.is_contiguous(), "scores must be a contiguous [batch, heads, queries, keys]");
  const int64_t batch = scores.size(0), heads = scores.size(1), queries = scores.size(2);
  require_visible(batch, heads, queries, slopes, places, starts);
  return {batch, heads, queries, scores.size(3), float(scale), optional_data<float>(slopes),
          optional_data<int64_t>(places), optional_data<int64_t>(starts), DropoutMask{}};
}

int64_t rows_of(const MaskedSoftmax& shape) { return shape.batch * shape.heads * shape.queries; }

int64_t grain(const MaskedSoftmax& shape) {
  return std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, shape.keys));
}

Tensor softmax_forward(const Tensor& scores, double scale, const std::optional<Tensor>& slopes,
                       const std::optional<Tensor>& places, const std::optional<Tensor>& starts) {
  const MaskedSoftmax shape = softmax_of(scores, scale, slopes, places, starts);
  Tensor out = torch::stable::empty_like(scores);
  with_type_of(scores, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, rows_of(shape), grain(shape), [&](int64_t first, int64_t last) {
      megads::softmax_forward<T>(shape, data_of<T>(scores), data_of<T>(out), nullptr, first, last);
    });
  });
  return out;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& out, double scale, const std::optional<Tensor>& places,
                        const std::optional<Tensor>& starts) {
  const MaskedSoftmax shape = softmax_of(out, scale, std::nullopt, places, starts);
  require_like(grad, out, "grad must have shape and dtype of the probabilities");
  require(grad.is_contiguous(), "grad must be contiguous");
  Tensor grad_scores = torch::stable::empty_like(out);
  with_type_of(out, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, rows_of(shape), grain(shape), [&](int64_t first, int64_t last) {
      megads::softmax_backward<T>(shape, data_of<T>(grad), data_of<T>(out), data_of<T>(grad_scores), nullptr, first,
                                   last);
    });
  });
  return grad_scores;
}

std::tuple<Tensor, Tensor> softmax_dropout_forward(const Tensor& scores, double scale,
                                                   const std::optional<Tensor>& slopes,
                                                   const std::optional<Tensor>& places,
                                                   const std::optional<Tensor>& starts, const Tensor& samples,
                                                   int64_t key, int64_t threshold, int64_t first_head) {
  MaskedSoftmax shape = softmax_of(scores, scale, slopes, places, starts);
  shape.dropout = mask_of(samples, shape.batch, key, threshold, first_head);
  Tensor out = torch::stable::empty_like(scores), dropped = torch::stable::empty_like(scores);
  with_type_of(scores, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, rows_of(shape), grain(shape), [&](int64_t first, int64_t last) {
      megads::softmax_forward<T>(shape, data_of<T>(scores), data_of<T>(out), data_of<T>(dropped), first, last);
    });
  });
  return {out, dropped};
}

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad, const Tensor& out, double scale,
                                                    const std::optional<Tensor>& places,
                                                    const std::optional<Tensor>& starts, const Tensor& samples,
                                                    int64_t key, int64_t threshold, int64_t first_head) {
  MaskedSoftmax shape = softmax_of(out, scale, std::nullopt, places, starts);
  shape.dropout = mask_of(samples, shape.batch, key, threshold, first_head);
  require_like(grad, out, "grad must have shape and dtype of the probabilities");
  require(grad.is_contiguous(), "grad must be contiguous");
  Tensor grad_scores = torch::stable::empty_like(out), dropped = torch::stable::empty_like(out);
  with_type_of(out, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, rows_of(shape), grain(shape), [&](int64_t first, int64_t last) {
      megads::softmax_backward<T>(shape, data_of<T>(grad), data_of<T>(out), data_of<T>(grad_scores),
                                  data_of<T>(dropped), first, last);
    });
  });
  return {grad_scores, dropped};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def(
      "softmax_forward(Tensor scores, float scale, Tensor? slopes, Tensor? places, Tensor? starts) -> Tensor");
  library.def("softmax_backward(Tensor grad, Tensor out, float scale, Tensor? places, Tensor? starts) -> Tensor");
  library.def(
      "softmax_dropout_forward(Tensor scores, float scale, Tensor? slopes, Tensor? places, Tensor? starts, "
      "Tensor samples, int key, int threshold, int first_head) -> (Tensor, Tensor)");
  library.def(
      "softmax_dropout_backward(Tensor grad, Tensor out, float scale, Tensor? places, Tensor? starts, Tensor samples, "
      "int key, int threshold, int first_head) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("softmax_forward", TORCH_BOX(&megads::bindings::softmax_forward));
  library.impl("softmax_backward", TORCH_BOX(&megads::bindings::softmax_backward));
  library.impl("softmax_dropout_forward", TORCH_BOX(&megads::bindings::softmax_dropout_forward));
  library.impl("softmax_dropout_backward", TORCH_BOX(&megads::bindings::softmax_dropout_backward));
}
