#include "gelu.h"

#include "gelu_formula.h"
#include "lanes.h"

namespace megads {

template <typename T>
void gelu_forward(const T* x, T* out, int64_t first, int64_t last) {
  for_two_vectors(first, last, [&](int64_t i, int count) {
    const TwoVectors of_x = load_two_lanes(x + i, count);
    store_two_lanes(out + i, {gelu<T>(of_x.first), gelu<T>(of_x.second)}, count);
  });
}

template <typename T>
void gelu_backward(const T* grad, const T* x, T* grad_x, int64_t first, int64_t last) {
  for_two_vectors(first, last, [&](int64_t i, int count) {
    const TwoVectors of_x = load_two_lanes(x + i, count), g = load_two_lanes(grad + i, count);
    store_two_lanes(grad_x + i, {g.first * gelu_slope<T>(of_x.first), g.second * gelu_slope<T>(of_x.second)}, count);
  });
}

#define MEGADS_INSTANTIATE(T)                                            \
  template void gelu_forward<T>(const T*, T*, int64_t, int64_t);         \
  template void gelu_backward<T>(const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
