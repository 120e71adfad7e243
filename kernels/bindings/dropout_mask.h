// Argument checks of dropout masks, shared by attention, softmax and dropout.
#pragma once

#include "../cpu/philox.h"
#include "tensors.h"

namespace megads::bindings {

// samples: sample IDs, int64 [batch]; none: no dropout.
inline DropoutMask mask_of(const std::optional<Tensor>& samples, int64_t batch, int64_t key, int64_t threshold,
                           int64_t first_head) {
  if (samples)
    require(samples->scalar_type() == ScalarType::Long && samples->dim() == 1 && samples->size(0) == batch &&
                samples->is_contiguous(), "samples must be a contiguous int64 [batch]");
  require(threshold >= 0 && threshold < 65536, "the threshold of dropout must be in 0..65535");
  return {uint64_t(key), uint32_t(threshold), optional_data<int64_t>(samples), first_head};
}

}  // namespace megads::bindings
