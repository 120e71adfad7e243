// Vector loops over rows of any length.
#pragma once

#include <algorithm>

#include "vector.h"

namespace megads {

// Calls body(i, count) for every vector of first..last-1; count < kLanes for the last one only.
template <typename Body>
inline __attribute__((always_inline)) void for_vectors(int64_t first, int64_t last, Body body) {
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) body(i, kLanes);
  if (i < last) body(i, int(last - i));
}

// Loads the first `count` lanes; the others are zero.
template <typename T>
inline __attribute__((always_inline)) Floats load_lanes(const T* from, int count) {
  return count == kLanes ? load(from) : load_some(from, count, 0.0f);
}

template <typename T>
inline __attribute__((always_inline)) void store_lanes(T* to, Floats x, int count) {
  if (count == kLanes) {
    store(to, x);
  } else {
    store_some(to, x, count);
  }
}

// Calls body(i, count) for every two vectors of first..last-1; count < 2 * kLanes for the last ones only.
template <typename Body>
inline __attribute__((always_inline)) void for_two_vectors(int64_t first, int64_t last, Body body) {
  int64_t i = first;
  for (; i + 2 * kLanes <= last; i += 2 * kLanes) body(i, 2 * kLanes);
  if (i < last) body(i, int(last - i));
}

// Loads the first `count` elements; the others are zero.
template <typename T>
inline __attribute__((always_inline)) TwoVectors load_two_lanes(const T* from, int count) {
  if (count == 2 * kLanes) return load_two(from);
  if constexpr (kEvenAndOdd<T>) {
    T some[2 * kLanes] = {};
    for (int i = 0; i < count; ++i) some[i] = from[i];
    return load_two(some);
  } else {
    if (count <= kLanes) return {load_lanes(from, count), Floats{}};
    return {load(from), load_lanes(from + kLanes, count - kLanes)};
  }
}

template <typename T>
inline __attribute__((always_inline)) void store_two_lanes(T* to, TwoVectors x, int count) {
  if (count == 2 * kLanes) {
    store_two(to, x);
  } else if constexpr (!kEvenAndOdd<T>) {
    store_lanes(to, x.first, std::min(count, kLanes));
    if (count > kLanes) store_lanes(to + kLanes, x.second, count - kLanes);
  } else {
    T some[2 * kLanes];
    store_two(some, x);
    for (int i = 0; i < count; ++i) to[i] = some[i];
  }
}

// out = function(in...), element by element, for elements first..last-1.
template <typename T, typename Function, typename... In>
inline __attribute__((always_inline)) void for_elements(int64_t first, int64_t last, T* out, Function function,
                                                        const In*... in) {
  if constexpr (kEvenAndOdd<T>) {
    for_two_vectors(first, last, [&](int64_t i, int count) {
      const auto results = [&](auto... x) { return TwoVectors{function(x.first...), function(x.second...)}; };
      store_two_lanes(out + i, results(load_two_lanes(in + i, count)...), count);
    });
  } else {
    for_vectors(first, last,
                [&](int64_t i, int count) { store_lanes(out + i, function(load_lanes(in + i, count)...), count); });
  }
}

}  // namespace megads
