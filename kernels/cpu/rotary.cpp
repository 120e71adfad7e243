#include "rotary.h"

#include "lanes.h"

namespace megads {

template <typename T>
void rotary(const Rotary& shape, const T* x, T* out, int64_t first, int64_t last) {
  const int64_t pairs = shape.pairs;
  const float sign = shape.backward ? -1.0f : 1.0f;
  for (int64_t i = first; i < last; ++i) {
    const int64_t b = i / shape.tokens, token = i % shape.tokens;
    const float *cos = shape.cos + b * shape.of_batch + token * pairs;
    const float *sin = shape.sin + b * shape.of_batch + token * pairs;
    for (int64_t n = 0; n < shape.heads; ++n) {
      const T* from = x + b * shape.batch_stride + token * shape.token_stride + n * shape.head_stride;
      T* to = out + (i * shape.heads + n) * 2 * pairs;
      for_vectors(0, pairs, [&](int64_t p, int count) {
        const Floats c = load_lanes(cos + p, count), s = load_lanes(sin + p, count) * sign;
        const Floats one = load_lanes(from + p, count), other = load_lanes(from + pairs + p, count);
        store_lanes(to + p, one * c - other * s, count);
        store_lanes(to + pairs + p, other * c + one * s, count);
      });
    }
  }
}

#define MEGADS_INSTANTIATE(T) template void rotary<T>(const Rotary&, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
