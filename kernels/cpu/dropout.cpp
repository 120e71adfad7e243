#include "dropout.h"

#include "lanes.h"

namespace megads {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

inline __attribute__((always_inline)) Floats load_bytes(const uint8_t* from, int count) {
  Bytes bytes{};
  if (count == kLanes) {
    std::memcpy(&bytes, from, sizeof bytes);
  } else {
    std::memcpy(&bytes, from, count);
  }
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}

}  // namespace

template <typename T>
void dropout(const T* x, const uint8_t* keep, float scale, const T* residual, T* out, int64_t first, int64_t last) {
  for_vectors(first, last, [&](int64_t i, int count) {
    Floats found = load_lanes(x + i, count) * (load_bytes(keep + i, count) * scale);
    if (residual) found += load_lanes(residual + i, count);
    store_lanes(out + i, found, count);
  });
}

#define MEGADS_INSTANTIATE(T) \
  template void dropout<T>(const T*, const uint8_t*, float, const T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
