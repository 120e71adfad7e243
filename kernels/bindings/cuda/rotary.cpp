// Rotary position embedding, on a GPU.
#include "device_tensors.h"

namespace megads::bindings {
namespace {

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool backward) {
  require(x.dim() == 4 && x.size(3) % 2 == 0 && (x.stride(3) == 1 || x.numel() == 0),
          "x must be [batch, tokens, heads, dim], the last dim even and contiguous");
  const int64_t batch = x.size(0), tokens = x.size(1), heads = x.size(2), dim = x.size(3);
  for (const Tensor* table : {&cos, &sin})
    require(table->scalar_type() == ScalarType::Float && table->dim() == 3 && table->size(0) == cos.size(0) &&
                (table->size(0) == 1 || table->size(0) == batch) && table->size(1) == tokens &&
                table->size(2) == dim / 2 && table->get_device() == x.get_device(),
            "cos and sin must be fp32 [batch or 1, tokens, dim / 2] on the device of x");
  require_together({&cos, &sin});
  Tensor out = empty(x, {batch, tokens, heads, dim});
  const Launch launch(x);
  launch(megads_cuda_rotary, number_of_type(x), batch, tokens, heads, dim, x.stride(0), x.stride(1), x.stride(2),
         cos.size(0) * tokens, int64_t(backward), data(x), data_of<float>(cos), data_of<float>(sin), data(out));
  return out;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_IMPL(megads, CUDA, library) { library.impl("rotary", TORCH_BOX(&megads::bindings::rotary)); }
