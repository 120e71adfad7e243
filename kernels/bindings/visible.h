// Checks of mask and bias arguments, shared by attention and softmax.
#pragma once

#include "tensors.h"

namespace megads::bindings {

// slopes: ALiBi slope of every head; places: position of every query among the keys; starts: first visible key of every
// query.
inline void require_visible(int64_t batch, int64_t heads, int64_t queries, const std::optional<Tensor>& slopes,
                            const std::optional<Tensor>& places, const std::optional<Tensor>& starts) {
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
}

}  // namespace megads::bindings
