// fp32 vectors of the machine's register width, by the compiler's vector extension (GCC, Clang): one source for
// AVX-512, AVX2, SSE and NEON. All arithmetic is in fp32; bf16 is a storage type only.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <limits>

namespace megads {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// bf16: the upper half of an fp32 number.
struct BFloat16 {
  uint16_t bits;
};

inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Words load_halves(const BFloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)bits);  // GCC 12 widens each half of the vector separately
#endif
  return __builtin_convertvector(bits, Words);
}

inline Floats load(const BFloat16* from) { return (Floats)(load_halves(from) << 16); }

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
inline void store(BFloat16* to, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded_bits = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &rounded_bits, sizeof rounded_bits);
  return;
#endif
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = x == x ? rounded : Words{} + 0x7fc0u;
  Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float* to, float x) { *to = x; }

inline void narrow(BFloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = x == x ? uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : uint16_t(0x7fc0);
}

// Loads the first `count` lanes; the others are `rest`.
template <typename T>
inline Floats load_some(const T* from, int64_t count, float rest) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 some = __mmask16((1u << count) - 1u);
  if constexpr (sizeof(T) == 4) {
    return (Floats)_mm512_mask_loadu_ps((__m512)broadcast(rest), some, from);
  } else {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from));
    return (Floats)_mm512_mask_blend_ps(some, (__m512)broadcast(rest), (__m512)_mm512_slli_epi32(bits, 16));
  }
#endif
  Floats x = broadcast(rest);
  for (int64_t lane = 0; lane < count; ++lane) x[lane] = widen(from[lane]);
  return x;
}

template <typename T>
inline void store_some(T* to, Floats x, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 some = __mmask16((1u << count) - 1u);
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(to, some, (__m512)x);
  } else {
    Halves halves;
    store(reinterpret_cast<BFloat16*>(&halves), x);
    _mm256_mask_storeu_epi16(to, some, (__m256i)halves);
  }
  return;
#endif
  for (int64_t lane = 0; lane < count; ++lane) narrow(to + lane, x[lane]);
}

inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

// Lane-wise maximum; y where either is NaN.
inline Floats larger(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return x > y ? x : y;
#endif
}

// Maximum over lanes. NaN lanes are ignored, or the result is NaN.
inline float largest_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float largest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = x[lane] > largest ? x[lane] : largest;
  return largest;
}

// e^x within 2 ulp; NaN stays NaN. Denormal results may be zero, and above 88 the result may stay e^88. x = n ln 2 + r
// with |r| <= ln 2 / 2; the polynomial for e^r is that of the Cephes library (Moshier 1989).
inline Floats exp(Floats x) {
  const Floats lowest = broadcast(-110.0f), highest = broadcast(88.0f), magic = broadcast(12582912.0f);
  Floats within = larger(lowest, x);
#if !defined(__AVX512F__)
  within = within > highest ? highest : within;
#endif
  Floats rounded = within * 1.44269504088896341f + magic;  // adding 1.5 * 2^23 rounds to an integer
  Floats n = rounded - magic;
  Floats r = within - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#endif
  Ints exponent = ((Ints)rounded - (Ints)magic) << 23;
  Floats result = (Floats)((Ints)p + exponent);
  result = x == x ? result : x;
  return x < -87.33f ? Floats{} : result;
}

// 2^x within 1 ulp, or within 3e-6 if the result is rounded to bf16; NaN stays NaN, denormal results may be zero.
// x = n + r with 0 <= r < 1; the polynomials for 2^r are 1 at 0 and minimize the maximum relative error (fitted by
// weighted least squares).
template <typename RoundedTo = float>
inline Floats exp2(Floats x) {
  const Floats within = larger(broadcast(-150.0f), x);
#if defined(__AVX512F__)
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)within, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const Floats magic = broadcast(12582912.0f), nearest = within + magic - magic;
  const Floats n = nearest > within ? nearest - 1.0f : nearest;
#endif
  const Floats r = within - n;
  Floats p;
  if constexpr (sizeof(RoundedTo) == 2) {
    p = broadcast(1.3426688499748707e-2f);
    p = p * r + 5.2242465317249298e-2f;
    p = p * r + 2.4128021299839020e-1f;
    p = p * r + 6.9304484128952026e-1f;
  } else {
    p = broadcast(2.1612919226754457e-4f);
    p = p * r + 1.2467844644561410e-3f;
    p = p * r + 9.6754515543580055e-3f;
    p = p * r + 5.5485282093286514e-2f;
    p = p * r + 2.4022930860519409e-1f;
    p = p * r + 6.9314706325531006e-1f;
  }
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Floats result = x == x ? (Floats)((Ints)p + (__builtin_convertvector(n, Ints) << 23)) : x;
  return x < -126.0f ? Floats{} : result;
#endif
}

}  // namespace megads
