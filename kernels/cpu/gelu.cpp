#include "gelu.h"

#include "gelu_formula.h"
#include "lanes.h"

namespace megads {

template <typename T>
void gelu_forward(const T* x, T* out, int64_t first, int64_t last) {
  for_elements(first, last, out, [](Floats x) { return gelu<T>(x); }, x);
}

template <typename T>
void gelu_backward(const T* grad, const T* x, T* grad_x, int64_t first, int64_t last) {
  for_elements(first, last, grad_x, [](Floats grad, Floats x) { return grad * gelu_slope<T>(x); }, grad, x);
}

#define MEGADS_INSTANTIATE(T)                                            \
  template void gelu_forward<T>(const T*, T*, int64_t, int64_t);         \
  template void gelu_backward<T>(const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
