// Rotary position embedding: operator schema, argument checks and threading.
#include "../cpu/rotary.h"

#include <algorithm>

#include "tensors.h"

namespace megads::bindings {
namespace {

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool backward) {
  require(x.dim() == 4 && x.size(3) % 2 == 0 && (x.stride(3) == 1 || x.numel() == 0),
          "x must be [batch, tokens, heads, dim], the last dim even and contiguous");
  const int64_t tokens = x.size(1), heads = x.size(2), pairs = x.size(3) / 2;
  for (const Tensor* table : {&cos, &sin})
    require(table->scalar_type() == ScalarType::Float && table->is_contiguous() && table->dim() == 3 &&
                (table->size(0) == 1 || table->size(0) == x.size(0)) && table->size(1) == tokens &&
                table->size(2) == pairs && table->size(0) == cos.size(0),
            "cos and sin must be contiguous fp32 [batch or 1, tokens, dim / 2]");
  Tensor out = torch::stable::new_empty(x, std::vector<int64_t>{x.size(0), tokens, heads, 2 * pairs});
  const int64_t of_batch = cos.size(0) == 1 ? 0 : tokens * pairs;
  const Rotary shape{tokens, heads, pairs, x.stride(0), x.stride(1), x.stride(2), data_of<float>(cos),
                     data_of<float>(sin), of_batch, backward};
  const int64_t grain = std::max<int64_t>(1, kElementsOfOneThread / std::max<int64_t>(1, heads * 2 * pairs));
  with_type_of(x, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    torch::stable::parallel_for(0, x.size(0) * tokens, grain, [&](int64_t first, int64_t last) {
      megads::rotary<T>(shape, data_of<T>(x), data_of<T>(out), first, last);
    });
  });
  return out;
}

}  // namespace
}  // namespace megads::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(megads, library) {
  library.def("rotary(Tensor x, Tensor cos, Tensor sin, bool backward) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megads, CPU, library) { library.impl("rotary", TORCH_BOX(&megads::bindings::rotary)); }
