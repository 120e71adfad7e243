// Dropout masks as a pure function of the position, by Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). Masks are not stored but regenerated when needed. megads/ops/dropout.py defines which counter
// gives what, and implements the same in plain torch.
#pragma once

#include "lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace megads {

// Parameters of a mask, besides the position in it.
//   key: from the run's seed and the position in the model.
//   threshold: an element is dropped if its 16 random bits are below it.
//   samples: sample IDs, [batch]; null: no dropout.
//   first_head: index of head 0 in the whole model.
struct DropoutMask {
  uint64_t key;
  uint32_t threshold;
  const int64_t* samples;
  int64_t first_head;

  // Scale of kept elements, which preserves the expectation.
  float scale() const { return float(65536.0 / double(65536 - threshold)); }
};

constexpr int64_t kPhiloxElements = 8;  // elements per counter, 16 bits each

// One 64-bit integer per lane. Philox works on the lower halves; the upper ones are undefined.
typedef uint64_t Longs __attribute__((vector_size(kLanes * 4)));

// Products of the lower halves.
inline Longs multiply_halves(Longs x, uint32_t factor) {
  const Longs factors = Longs{} + factor;
#if defined(__AVX512F__)
  return (Longs)_mm512_mul_epu32((__m512i)x, (__m512i)factors);
#elif defined(__AVX2__)
  return (Longs)_mm256_mul_epu32((__m256i)x, (__m256i)factors);
#elif defined(__SSE2__)
  return (Longs)_mm_mul_epu32((__m128i)x, (__m128i)factors);
#else
  return (x & 0xffffffffu) * factors;
#endif
}

// Generates masks of rows: of a query over its keys, or of a token over its features.
class MaskRows {
  static constexpr int kRounds = 10, kCounters = kLanes / 2;

 public:
  // Elements that `draw` needs in `room` beyond those requested.
  static constexpr int64_t kMore = kPhiloxElements + kCounters * kPhiloxElements + kLanes;

  explicit MaskRows(const DropoutMask& mask) : mask_(mask), scale_(mask.scale()) {
    uint32_t k0 = uint32_t(mask.key), k1 = uint32_t(mask.key >> 32);
    for (int round = 0; round < kRounds; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
      keys_[2 * round] = Longs{} + uint64_t(k0);
      keys_[2 * round + 1] = Longs{} + uint64_t(k1);
    }
    for (int lane = 0; lane < kCounters; ++lane) lanes_[lane] = uint64_t(lane);
  }

  // Generates elements first..last-1 of a row into `room`, of last - first + kMore; returns the address of the first
  // one.
  const uint16_t* draw(int64_t sample, int64_t head, int64_t place, int64_t first, int64_t last, uint16_t* room) const {
    const uint64_t number = uint64_t(mask_.samples[sample]);
    const Longs of_place = Longs{} + uint64_t(uint32_t(place)), of_sample = Longs{} + uint64_t(uint32_t(number));
    const Longs of_head = Longs{} + uint64_t(uint32_t(number >> 32) << 16 | uint32_t(mask_.first_head + head));
    const int64_t start = first / kPhiloxElements;
    uint16_t* to = room;
    for (int64_t counter = start; counter * kPhiloxElements < last; counter += kCounters) {
      Longs x0 = lanes_ + uint64_t(counter), x1 = of_place, x2 = of_sample, x3 = of_head;
#pragma GCC unroll 10
      for (int round = 0; round < kRounds; ++round) {
        const Longs p0 = multiply_halves(x0, 0xd2511f53u), p1 = multiply_halves(x2, 0xcd9e8d57u);
        x0 = p1 >> 32 ^ x1 ^ keys_[2 * round];
        x2 = p0 >> 32 ^ x3 ^ keys_[2 * round + 1];
        x1 = p1;
        x3 = p0;
      }
      store_pairs(to, (x0 & 0xffffffffu) | x1 << 32, (x2 & 0xffffffffu) | x3 << 32);
      to += kCounters * kPhiloxElements;
    }
    return room + (first - start * kPhiloxElements);
  }

  // Lane mask of the elements at `drawn`: all ones in kept lanes.
  Ints stays(const uint16_t* drawn) const {
    return (Ints)(load_halves(reinterpret_cast<const BFloat16*>(drawn)) >= mask_.threshold);
  }

  // Likewise for the elements that load_two<T> loads.
  template <typename T>
  TwoMasks two_stay(const uint16_t* drawn) const {
    if constexpr (kEvenAndOdd<T>) {
      Words both;
      std::memcpy(&both, drawn, sizeof both);
      return {(Ints)((both & 0xffffu) >= mask_.threshold), (Ints)((both >> 16) >= mask_.threshold)};
    } else {
      return {stays(drawn), stays(drawn + kLanes)};
    }
  }

  float scale() const { return scale_; }

 private:
  // Stores both integers of a lane next to each other.
  static void store_pairs(uint16_t* to, Longs low, Longs high) {
    uint64_t both[kLanes];
#pragma GCC unroll 8
    for (int lane = 0; lane < kCounters; ++lane) {
      both[2 * lane] = low[lane];
      both[2 * lane + 1] = high[lane];
    }
    std::memcpy(to, both, sizeof both);
  }

  DropoutMask mask_;
  float scale_;
  Longs keys_[2 * kRounds], lanes_;
};

}  // namespace megads
