// Attention: operator schema, argument checks and threading.
#include "../cpu/attention.h"

#include "dropout_mask.h"
#include "visible.h"

namespace megads::bindings {
namespace {

template <typename T>
Rows<T> rows_of(const Tensor& x) {
  return {data_of<std::remove_const_t<T>>(x), x.stride(0), x.stride(1), x.stride(2)};
}

void require_rows(const Tensor& x, const Tensor& other) {
  require(x.dim() == 4 && x.scalar_type() == other.scalar_type() && x.size(0) == other.size(0) &&
              x.size(3) == other.size(3) && (x.size(3) <= 1 || x.stride(3) == 1 || x.numel() == 0),
          "queries, keys and values must be [batch, heads, rows, dim] of one dtype, the last dim contiguous");
}

Attention attention_of(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& slopes,
                       const std::optional<Tensor>& places, const std::optional<Tensor>& starts, double scale,
                       const std::optional<Tensor>& samples, int64_t key, int64_t threshold, int64_t first_head) {
  for (const Tensor* x : {&q, &k, &v}) require_rows(*x, q);
  require(k.size(2) == v.size(2) && k.size(1) == v.size(1), "keys and values must be as many");
  require(k.size(1) == q.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0),
          "the heads of keys and values must divide those of the queries");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2);
  require_visible(batch, heads, queries, slopes, places, starts);
  return {batch, heads, k.size(1), queries, k.size(2), q.size(3), float(scale), optional_data<float>(slopes),
          optional_data<int64_t>(places), optional_data<int64_t>(starts),
          mask_of(samples, batch, key, threshold, first_head)};
}

// Has the shape of x, [batch, heads, rows, dim], in memory [batch, rows, heads, dim], the layout that projections read.
Tensor rows_like(const Tensor& x) {
  Tensor flat = torch::stable::new_empty(x, std::vector<int64_t>{x.size(0), x.size(2), x.size(1), x.size(3)});
  return torch::stable::transpose(flat, 1, 2);
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const std::optional<Tensor>& slopes, const std::optional<Tensor>& places,
                                             const std::optional<Tensor>& starts, double scale,
                                             const std::optional<Tensor>& samples, int64_t key, int64_t threshold,
                                             int64_t first_head) {
  const Attention shape = attention_of(q, k, v, slopes, places, starts, scale, samples, key, threshold, first_head);
  Tensor out = rows_like(q);
  Tensor statistics = fp32_like(q, {shape.batch, shape.heads, shape.queries, 2});
  with_type_of(q, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, attention_tasks(shape), 1, [&](int64_t first, int64_t last) {
      megads::attention_forward<T>(shape, rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v),
                                   rows_of<T>(out), data_of<float>(statistics), first, last);
    });
  });
  return {out, statistics};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& out, const Tensor& statistics,
                                                      const std::optional<Tensor>& slopes,
                                                      const std::optional<Tensor>& places,
                                                      const std::optional<Tensor>& starts, double scale,
                                                      const std::optional<Tensor>& samples, int64_t key,
                                                      int64_t threshold, int64_t first_head) {
  const Attention shape = attention_of(q, k, v, slopes, places, starts, scale, samples, key, threshold, first_head);
  require_rows(grad, q);
  require_rows(out, q);
  require(grad.size(1) == shape.heads && out.size(1) == shape.heads && grad.size(2) == shape.queries &&
              out.size(2) == shape.queries,
          "grad and out must have the shape of q");
  require(statistics.scalar_type() == ScalarType::Float && statistics.is_contiguous() &&
              statistics.numel() == shape.batch * shape.heads * shape.queries * 2,
          "statistics must be the forward pass's");
  Tensor grad_q = rows_like(q), grad_k = rows_like(k), grad_v = rows_like(v);
  with_type_of(q, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const AttentionBackward<T> tensors{rows_of<const T>(grad),   rows_of<const T>(q),
                                       rows_of<const T>(k),      rows_of<const T>(v),
                                       rows_of<const T>(out),    data_of<const float>(statistics),
                                       rows_of<T>(grad_q),       rows_of<T>(grad_k),
                                       rows_of<T>(grad_v)};
    const auto run = [&](BackwardPart part) {
      torch::stable::parallel_for(0, attention_backward_tasks(shape, part), 1, [&](int64_t first, int64_t last) {
        megads::attention_backward<T>(shape, part, tensors, first, last);
      });
    };
    if (backward_by_heads(shape, torch::stable::get_num_threads())) {
      run(BackwardPart::heads);
    } else {
      run(BackwardPart::queries);
      run(BackwardPart::keys);
    }
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? places, Tensor? starts, float scale, "
      "Tensor? samples, int key, int threshold, int first_head) -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, Tensor? slopes, "
      "Tensor? places, Tensor? starts, float scale, Tensor? samples, int key, int threshold, int first_head) "
      "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("attention_forward", TORCH_BOX(&megads::bindings::attention_forward));
  library.impl("attention_backward", TORCH_BOX(&megads::bindings::attention_backward));
}
