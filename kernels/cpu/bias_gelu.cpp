#include "bias_gelu.h"

#include "gelu_formula.h"
#include "row_blocks.h"

namespace megads {

template <typename T>
void bias_gelu_forward(int64_t width, const T* x, const T* bias, T* out, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r)
    for_elements(0, width, out + r * width, [](Floats x, Floats b) { return gelu<T>(x + b); }, x + r * width, bias);
}

template <typename T>
void bias_gelu_backward(int64_t rows, int64_t width, const T* grad, const T* x, const T* bias, T* grad_x,
                        float* partial, int64_t first, int64_t last) {
  const int64_t block_rows = rows_of_block(rows);
  for (int64_t block = first; block < last; ++block) {
    float* of_bias = partial + block * width;
    std::fill(of_bias, of_bias + width, 0.0f);
    for (int64_t r = block * block_rows; r < std::min((block + 1) * block_rows, rows); ++r)
      for_vectors(0, width, [&](int64_t c, int count) {
        const int64_t at = r * width + c;
        const Floats slope = gelu_slope<T>(load_lanes(x + at, count) + load_lanes(bias + c, count));
        const Floats found = load_lanes(grad + at, count) * slope;
        store_lanes(grad_x + at, found, count);
        store_lanes(of_bias + c, load_lanes(of_bias + c, count) + found, count);
      });
  }
}

#define MEGADS_INSTANTIATE(T)                                                                                  \
  template void bias_gelu_forward<T>(int64_t, const T*, const T*, T*, int64_t, int64_t);                       \
  template void bias_gelu_backward<T>(int64_t, int64_t, const T*, const T*, const T*, T*, float*, int64_t,     \
                                      int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
