// LayerNorm and RMSNorm: operator schema, argument checks and threading.
#include "../cpu/norm.h"

#include <algorithm>

#include "sums.h"

namespace megads::bindings {
namespace {

Norm norm_of(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps, bool centred) {
  require(x.dim() == 2 && x.is_contiguous(), "x must be a contiguous [rows, width]");
  for (const Tensor* of_columns : {&weight, bias ? &*bias : &weight})
    require(of_columns->dim() == 1 && of_columns->size(0) == x.size(1) && of_columns->is_contiguous() &&
                of_columns->scalar_type() == x.scalar_type(),
            "weight and bias must be contiguous [width] of x's dtype");
  return {x.size(0), x.size(1), float(eps), centred};
}

int64_t grain(const Norm& shape, int64_t rows) {
  return std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, rows * shape.width));
}

template <typename T>
T* data_or_null(const std::optional<Tensor>& x) {
  return x ? data_of<T>(*x) : nullptr;
}

void run_forward(const Norm& shape, const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight,
                 const std::optional<Tensor>& bias, const std::optional<Tensor>& added, const Tensor& out,
                 const Tensor& statistics) {
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, shape.rows, grain(shape, 1), [&](int64_t first, int64_t last) {
      megads::norm_forward<T>(shape, data_of<T>(x), data_or_null<T>(residual), data_of<T>(weight),
                              data_or_null<T>(bias), data_or_null<T>(added), data_of<T>(out),
                              data_of<float>(statistics), first, last);
    });
  });
}

std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                        double eps, bool centred) {
  const Norm shape = norm_of(x, weight, bias, eps, centred);
  Tensor out = torch::stable::empty_like(x), statistics = fp32_like(x, {shape.rows, 2});
  run_forward(shape, x, std::nullopt, weight, bias, std::nullopt, out, statistics);
  return {out, statistics};
}

std::tuple<Tensor, Tensor, Tensor> add_norm_forward(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    const std::optional<Tensor>& bias, double eps, bool centred) {
  const Norm shape = norm_of(x, weight, bias, eps, centred);
  require_like(residual, x, "residual must have shape and dtype of x");
  require(residual.is_contiguous(), "residual must be contiguous");
  Tensor out = torch::stable::empty_like(x), added = torch::stable::empty_like(x);
  Tensor statistics = fp32_like(x, {shape.rows, 2});
  run_forward(shape, x, residual, weight, bias, added, out, statistics);
  return {out, added, statistics};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_added,
                                                 const Tensor& x, const Tensor& weight, const Tensor& statistics,
                                                 bool centred, bool has_bias) {
  const Norm shape = norm_of(x, weight, std::nullopt, 0.0, centred);
  for (const Tensor* like_x : {&grad, grad_added ? &*grad_added : &grad}) {
    require_like(*like_x, x, "gradients must have shape and dtype of x");
    require(like_x->is_contiguous(), "gradients must be contiguous");
  }
  require(statistics.scalar_type() == ScalarType::Float && statistics.is_contiguous() &&
              statistics.numel() == 2 * shape.rows, "statistics must be the forward pass's");
  const int64_t blocks = row_blocks(shape.rows);
  Tensor grad_x = torch::stable::empty_like(x), grad_weight = torch::stable::empty_like(weight);
  Tensor grad_bias = torch::stable::new_empty(weight, std::vector<int64_t>{has_bias ? shape.width : 0});
  Tensor partial = fp32_like(x, {blocks, 2, shape.width});
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, blocks, grain(shape, shape.rows / std::max<int64_t>(1, blocks)),
                                [&](int64_t first, int64_t last) {
      megads::norm_backward<T>(shape, data_of<T>(grad), data_or_null<T>(grad_added), data_of<T>(x),
                               data_of<T>(weight), data_of<float>(statistics), data_of<T>(grad_x),
                               data_of<float>(partial), first, last);
    });
    add_blocks_of<T>(partial, 0, grad_weight);
    if (has_bias) add_blocks_of<T>(partial, 1, grad_bias);
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("norm_forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor)");
  library.def(
      "add_norm_forward(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool centred) -> (Tensor, "
      "Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor grad, Tensor? grad_added, Tensor x, Tensor weight, Tensor statistics, bool centred, bool "
      "has_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) {
  library.impl("norm_forward", TORCH_BOX(&megads::bindings::norm_forward));
  library.impl("add_norm_forward", TORCH_BOX(&megads::bindings::add_norm_forward));
  library.impl("norm_backward", TORCH_BOX(&megads::bindings::norm_backward));
}
