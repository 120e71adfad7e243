// Dropout masks as a pure function of the position, by Philox4x32-10 (Salmon et al. 2011). megads/ops/dropout.py
// defines which counter gives what; kernels/cpu/philox.h generates the same bits.
#pragma once

#include "device.cuh"

namespace megads::cuda {

// Parameters of a mask, besides the position in it.
//   samples: sample IDs, [batch].
//   threshold: an element is dropped if its 16 random bits are below it.
struct DropoutMask {
  const int64_t* samples;
  uint32_t key_low, key_high, threshold;
  uint32_t first_head;
  float scale;  // of kept elements
};

inline DropoutMask mask_of(const int64_t* samples, int64_t key, int64_t threshold, int64_t first_head) {
  return {samples, uint32_t(key), uint32_t(uint64_t(key) >> 32), uint32_t(threshold), uint32_t(first_head),
          float(65536.0 / double(65536 - threshold))};
}

constexpr int kPhiloxElements = 8;  // elements per counter, 16 bits each

// Mask of one row: of a query over its keys, or of a token over its features.
struct MaskRow {
  uint32_t place, sample, head;

  __device__ __forceinline__ MaskRow(const DropoutMask& mask, uint32_t of_sample, uint32_t of_head, int64_t at_place) {
    const int64_t number = mask.samples[of_sample];
    place = uint32_t(at_place);
    sample = uint32_t(number);
    head = uint32_t(uint64_t(number) >> 32) << 16 | (mask.first_head + of_head);
  }

  // Bit i is set if element 8 * counter + i is kept.
  __device__ __forceinline__ uint32_t draw(const DropoutMask& mask, uint32_t counter) const {
    uint32_t x0 = counter, x1 = place, x2 = sample, x3 = head, k0 = mask.key_low, k1 = mask.key_high;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t(x0) * 0xd2511f53u, p1 = uint64_t(x2) * 0xcd9e8d57u;
      x0 = uint32_t(p1 >> 32) ^ x1 ^ k0;
      x2 = uint32_t(p0 >> 32) ^ x3 ^ k1;
      x1 = uint32_t(p1);
      x3 = uint32_t(p0);
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    const uint32_t words[4] = {x0, x1, x2, x3};
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kept |= uint32_t((words[i] & 0xffffu) >= mask.threshold) << 2 * i;
      kept |= uint32_t((words[i] >> 16) >= mask.threshold) << (2 * i + 1);
    }
    return kept;
  }

  // Bit i is set if element first + i is kept, for kCount <= 8 elements; bits before element 0 or past the row are
  // undefined. Not unrolled, as the generator's code is long.
  template <int kCount>
  __device__ __forceinline__ uint32_t draw_pack(const DropoutMask& mask, int first) const {
    static_assert(kCount <= kPhiloxElements);
    const int within = first & (kPhiloxElements - 1);
    uint32_t kept = 0;
#pragma unroll 1
    for (int part = 0; part < within + kCount; part += kPhiloxElements)
      kept |= draw(mask, uint32_t((first + part) >> 3)) << part;
    return kept >> within & ((1u << kCount) - 1);
  }

  // Bit p * kCount + i is set if element i of the pack at first + p * step is kept; packs that do not overlap elements
  // begin..end - 1 are not generated.
  template <int kCount, int kPacks>
  __device__ __forceinline__ uint32_t draw_packs(const DropoutMask& mask, int first, int step, int begin,
                                                 int end) const {
    static_assert(kCount * kPacks <= 32);
    uint32_t kept = 0;
#pragma unroll 1
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * step;
      if (at < end && at + kCount > begin) kept |= draw_pack<kCount>(mask, at) << p * kCount;
    }
    return kept;
  }
};

}  // namespace megads::cuda
