// The operators of namespace megads on torch's stable ABI: schemas, checks and threads; the arithmetic is in ../cpu.
// Fake implementations and gradients are registered from Python, in megads/ops.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "../cpu/attention.h"
#include "../cpu/cross_entropy.h"
#include "../cpu/gelu.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kElementsOfOneThread = 16384;

void require(bool holds, const char* message) { STD_TORCH_CHECK(holds, "megads: ", message); }

// Calls body with a null pointer of the element type: float or bf16.
template <typename Body>
void with_type_of(const Tensor& x, Body body) {
  if (x.scalar_type() == ScalarType::Float) {
    body(static_cast<float*>(nullptr));
  } else {
    require(x.scalar_type() == ScalarType::BFloat16, "the kernels take fp32 and bf16 tensors only");
    body(static_cast<megads::BFloat16*>(nullptr));
  }
}

template <typename T>
T* data_of(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

template <typename T>
const T* optional_data(const std::optional<Tensor>& x) {
  return x ? static_cast<const T*>(x->const_data_ptr()) : nullptr;
}

void require_like(const Tensor& x, const Tensor& other, const char* message) {
  bool same = x.scalar_type() == other.scalar_type() && x.dim() == other.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = x.size(d) == other.size(d);
  require(same, message);
}

Tensor fp32_like(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, std::vector<int64_t>(sizes), ScalarType::Float);
}

// ---- cross entropy

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

// ---- GELU

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

// ---- attention

template <typename T>
megads::Rows<T> rows_of(const Tensor& x) {
  return {data_of<std::remove_const_t<T>>(x), x.stride(0), x.stride(1), x.stride(2)};
}

void require_rows(const Tensor& x, const Tensor& other) {
  require(x.dim() == 4 && x.scalar_type() == other.scalar_type() && x.size(0) == other.size(0) &&
              x.size(1) == other.size(1) && x.size(3) == other.size(3) && (x.size(3) <= 1 || x.stride(3) == 1 || x.numel() == 0),
          "queries, keys and values must be [batch, heads, rows, dim] of one dtype, the last dim contiguous");
}

megads::Attention attention_of(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& slopes,
                               const std::optional<Tensor>& places, const std::optional<Tensor>& starts,
                               double scale) {
  for (const Tensor* x : {&q, &k, &v}) require_rows(*x, q);
  require(k.size(2) == v.size(2), "keys and values must be of one length");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2);
  if (slopes)
    require(slopes->scalar_type() == ScalarType::Float && slopes->dim() == 1 && slopes->size(0) == heads &&
                slopes->is_contiguous(), "slopes must be a contiguous fp32 [heads]");
  if (places)
    require(places->scalar_type() == ScalarType::Long && places->dim() == 1 && places->size(0) == queries &&
                places->is_contiguous(), "places must be a contiguous int64 [queries]");
  if (starts)
    require(starts->scalar_type() == ScalarType::Long && starts->dim() == 2 && starts->size(0) == batch &&
                starts->size(1) == queries && starts->is_contiguous(),
            "starts must be a contiguous int64 [batch, queries]");
  return {batch, heads, queries, k.size(2), q.size(3), float(scale), optional_data<float>(slopes),
          optional_data<int64_t>(places), optional_data<int64_t>(starts)};
}

// Shaped [batch, heads, rows, dim] as x, in memory [batch, rows, heads, dim]: what a projection reads.
Tensor rows_like(const Tensor& x) {
  Tensor flat = torch::stable::new_empty(x, std::vector<int64_t>{x.size(0), x.size(2), x.size(1), x.size(3)});
  return torch::stable::transpose(flat, 1, 2);
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const std::optional<Tensor>& slopes, const std::optional<Tensor>& places,
                                             const std::optional<Tensor>& starts, double scale) {
  const megads::Attention shape = attention_of(q, k, v, slopes, places, starts, scale);
  Tensor out = rows_like(q);
  Tensor statistics = fp32_like(q, {shape.batch, shape.heads, shape.queries, 2});
  with_type_of(q, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, megads::attention_tasks(shape), 1, [&](int64_t first, int64_t last) {
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
                                                      const std::optional<Tensor>& starts, double scale) {
  const megads::Attention shape = attention_of(q, k, v, slopes, places, starts, scale);
  require_rows(grad, q);
  require_rows(out, q);
  require(grad.size(2) == shape.queries && out.size(2) == shape.queries, "grad and out must have the shape of q");
  require(statistics.scalar_type() == ScalarType::Float && statistics.is_contiguous() &&
              statistics.numel() == shape.batch * shape.heads * shape.queries * 2,
          "statistics must be the forward pass's");
  Tensor grad_q = rows_like(q), grad_k = rows_like(k), grad_v = rows_like(v);
  with_type_of(q, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, shape.batch * shape.heads, 1, [&](int64_t first, int64_t last) {
      megads::attention_backward<T>(shape, rows_of<const T>(grad), rows_of<const T>(q), rows_of<const T>(k),
                                    rows_of<const T>(v), rows_of<const T>(out), data_of<const float>(statistics),
                                    rows_of<T>(grad_q), rows_of<T>(grad_k), rows_of<T>(grad_v), first, last);
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

STABLE_TORCH_LIBRARY(megads, library) {
  library.def("cross_entropy_forward(Tensor logits, Tensor labels, int valid, int start) -> Tensor");
  library.def(
      "cross_entropy_backward(Tensor logits, Tensor labels, Tensor largest, Tensor total, Tensor grad, int valid, "
      "int start) -> Tensor");
  library.def("gelu_forward(Tensor x) -> Tensor");
  library.def("gelu_backward(Tensor grad, Tensor x) -> Tensor");
  library.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? places, Tensor? starts, float scale) "
      "-> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, Tensor? slopes, "
      "Tensor? places, Tensor? starts, float scale) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  library.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  library.impl("gelu_forward", TORCH_BOX(&gelu_forward));
  library.impl("gelu_backward", TORCH_BOX(&gelu_backward));
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
}
