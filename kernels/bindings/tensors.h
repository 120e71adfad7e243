// Shared by all bindings: torch's stable ABI, tensor checks, and typed data pointers.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../cpu/vector.h"

namespace megads::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kElementsOfOneThread = 16384;

inline void require(bool holds, const char* message) { STD_TORCH_CHECK(holds, "megads: ", message); }

// Calls body with a null pointer to the element type: float or bf16.
template <typename Body>
void with_type_of(const Tensor& x, Body body) {
  if (x.scalar_type() == ScalarType::Float) {
    body(static_cast<float*>(nullptr));
  } else {
    require(x.scalar_type() == ScalarType::BFloat16, "the kernels take fp32 and bf16 tensors only");
    body(static_cast<BFloat16*>(nullptr));
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

inline void require_like(const Tensor& x, const Tensor& other, const char* message) {
  bool same = x.scalar_type() == other.scalar_type() && x.dim() == other.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = x.size(d) == other.size(d);
  require(same, message);
}

inline Tensor fp32_like(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, std::vector<int64_t>(sizes), ScalarType::Float);
}

}  // namespace megads::bindings
