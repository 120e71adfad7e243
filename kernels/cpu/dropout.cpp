#include "dropout.h"

#include <vector>

namespace megads {

template <typename T>
void dropout(const HiddenDropout& shape, const T* x, const T* residual, T* out, int64_t first, int64_t last) {
  const MaskRows masks(shape.mask);
  const Floats scale = broadcast(masks.scale());
  std::vector<uint16_t> room(size_t(shape.width + MaskRows::kMore));
  for (int64_t row = first; row < last; ++row) {
    const int64_t token = row % shape.tokens, place = shape.places ? shape.places[token] : token;
    const uint16_t* drawn = masks.draw(row / shape.tokens, 0, place, 0, shape.width, room.data());
    const int64_t at = row * shape.width;
    for_vectors(0, shape.width, [&](int64_t i, int count) {
      // Multiplied, not selected, so that non-finite values propagate.
      Floats found = load_lanes(x + at + i, count) * (masks.stays(drawn + i) ? scale : Floats{});
      if (residual) found += load_lanes(residual + at + i, count);
      store_lanes(out + at + i, found, count);
    });
  }
}

#define MEGADS_INSTANTIATE(T) \
  template void dropout<T>(const HiddenDropout&, const T*, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
