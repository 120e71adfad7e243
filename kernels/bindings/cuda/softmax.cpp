// Softmax of attention scores, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

void require_masks(const Tensor& scores, const std::optional<Tensor>& slopes, const std::optional<Tensor>& places,
                   const std::optional<Tensor>& starts) {
  require(scores.dim() == 4, "scores must be [batch, heads, queries, keys]");
  for (const std::optional<Tensor>* x : {&slopes, &places, &starts}) require_together({&scores, *x ? &**x : &scores});
  require(!slopes || (slopes->scalar_type() == ScalarType::Float && slopes->numel() == scores.size(1)),
          "slopes must be fp32 [heads]");
  require(!places || (places->scalar_type() == ScalarType::Long && places->numel() == scores.size(2)),
          "places must be int64 [queries]");
  require(!starts || (starts->scalar_type() == ScalarType::Long && starts->dim() == 2 &&
                      starts->size(0) == scores.size(0) && starts->size(1) == scores.size(2)),
          "starts must be int64 [batch, queries]");
}

Tensor softmax_forward(const Tensor& scores, double scale, const std::optional<Tensor>& slopes,
                       const std::optional<Tensor>& places, const std::optional<Tensor>& starts) {
  require_masks(scores, slopes, places, starts);
  Tensor out = torch::stable::empty_like(scores);
  const Launch launch(scores);
  launch(megads_cuda_softmax_forward, number_of_type(scores), scores.size(0), scores.size(1), scores.size(2),
         scores.size(3), scale, optional_data<float>(slopes), optional_data<int64_t>(places),
         optional_data<int64_t>(starts), nullptr, data(scores), data(out), nullptr, 0, 0, 0, nullptr);
  return out;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& out, double scale, const std::optional<Tensor>& places,
                        const std::optional<Tensor>& starts) {
  require_masks(out, std::nullopt, places, starts);
  require_like(grad, out, "grad must have shape and dtype of the probabilities");
  require_together({&out, &grad});
  Tensor grad_scores = torch::stable::empty_like(out);
  const Launch launch(out);
  launch(megads_cuda_softmax_backward, number_of_type(out), out.size(0), out.size(1), out.size(2), out.size(3), scale,
         optional_data<int64_t>(places), optional_data<int64_t>(starts), data(grad), data(out), data(grad_scores),
         nullptr, 0, 0, 0, nullptr);
  return grad_scores;
}

std::tuple<Tensor, Tensor> softmax_dropout_forward(const Tensor& scores, double scale,
                                                   const std::optional<Tensor>& slopes,
                                                   const std::optional<Tensor>& places,
                                                   const std::optional<Tensor>& starts, const Tensor& samples,
                                                   int64_t key, int64_t threshold, int64_t first_head) {
  require_masks(scores, slopes, places, starts);
  require_mask(samples, scores.size(0), threshold);
  require_together({&scores, &samples});
  Tensor out = torch::stable::empty_like(scores), dropped = torch::stable::empty_like(scores);
  const Launch launch(scores);
  launch(megads_cuda_softmax_forward, number_of_type(scores), scores.size(0), scores.size(1), scores.size(2),
         scores.size(3), scale, optional_data<float>(slopes), optional_data<int64_t>(places),
         optional_data<int64_t>(starts), nullptr, data(scores), data(out), data_of<int64_t>(samples), key, threshold,
         first_head, data(dropped));
  return {out, dropped};
}

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad, const Tensor& out, double scale,
                                                    const std::optional<Tensor>& places,
                                                    const std::optional<Tensor>& starts, const Tensor& samples,
                                                    int64_t key, int64_t threshold, int64_t first_head) {
  require_masks(out, std::nullopt, places, starts);
  require_like(grad, out, "grad must have shape and dtype of the probabilities");
  require_mask(samples, out.size(0), threshold);
  require_together({&out, &grad, &samples});
  Tensor grad_scores = torch::stable::empty_like(out), dropped = torch::stable::empty_like(out);
  const Launch launch(out);
  launch(megads_cuda_softmax_backward, number_of_type(out), out.size(0), out.size(1), out.size(2), out.size(3), scale,
         optional_data<int64_t>(places), optional_data<int64_t>(starts), data(grad), data(out), data(grad_scores),
         data_of<int64_t>(samples), key, threshold, first_head, data(dropped));
  return {grad_scores, dropped};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) {
  library.impl("softmax_forward", TORCH_BOX(&megads::bindings::softmax_forward));
  library.impl("softmax_backward", TORCH_BOX(&megads::bindings::softmax_backward));
  library.impl("softmax_dropout_forward", TORCH_BOX(&megads::bindings::softmax_dropout_forward));
  library.impl("softmax_dropout_backward", TORCH_BOX(&megads::bindings::softmax_dropout_backward));
}
