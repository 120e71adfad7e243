#include "gelu.h"

#include "gelu_formula.h"

namespace megads {

template <typename T>
void gelu_forward(const T* x, T* out, int64_t first, int64_t last) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) store(out + i, gelu(load(x + i)));
  if (i < last) store_some(out + i, gelu(load_some(x + i, last - i, 0.0f)), last - i);
}

template <typename T>
void gelu_backward(const T* grad, const T* x, T* grad_x, int64_t first, int64_t last) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) store(grad_x + i, load(grad + i) * gelu_slope(load(x + i)));
  if (i < last) {
    const Floats some = load_some(grad + i, last - i, 0.0f) * gelu_slope(load_some(x + i, last - i, 0.0f));
    store_some(grad_x + i, some, last - i);
  }
}

#define MEGADS_INSTANTIATE(T)                                            \
  template void gelu_forward<T>(const T*, T*, int64_t, int64_t);         \
  template void gelu_backward<T>(const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
