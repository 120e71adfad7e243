// fp32 vectors of the machine's register width, by the compiler's vector extension (GCC, Clang): one source for
// AVX-512, AVX2, SSE and NEON. All arithmetic is in fp32; bf16 is a storage type only.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kNarrowsAtOnce = true;  // an instruction rounds fp32 to bf16
#else
constexpr bool kNarrowsAtOnce = false;
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
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)bits);  // likewise
#elif defined(__aarch64__)
  return (Words)vmovl_u16((uint16x4_t)bits);
#endif
  return __builtin_convertvector(bits, Words);
}

inline Floats load(const BFloat16* from) { return (Floats)(load_halves(from) << 16); }

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// The upper halves are bf16: rounded to nearest, ties to even, as torch does; NaN stays NaN. The lower halves are
// meaningless.
inline Words rounded_to_upper(Floats x) {
  const Words bits = (Words)x;
  return x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : Words{} + 0x7fc00000u;
}

// Rounds as rounded_to_upper does.
inline void store(BFloat16* to, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded_bits = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &rounded_bits, sizeof rounded_bits);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i upper = _mm256_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i packed = _mm256_shuffle_epi8((__m256i)rounded_to_upper(x), upper);
  const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x4_t halves = vcvt_bf16_f32((float32x4_t)x);
  std::memcpy(to, &halves, sizeof halves);
#else
  const Halves halves = __builtin_convertvector(rounded_to_upper(x) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
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

inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
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
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const Ints some = lane_numbers() < int32_t(count);
  if constexpr (sizeof(T) == 4) {
    const Floats x = (Floats)_mm256_maskload_ps(from, (__m256i)some);
    return some ? x : broadcast(rest);
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
#else
  T rounded[kLanes];
  store(rounded, x);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = rounded[lane];
#endif
}

// Two vectors of 2 * kLanes consecutive elements.
struct TwoVectors {
  Floats first, second;
};

// Lane masks of two vectors.
struct TwoMasks {
  Ints first, second;
};

// Whether the first vector holds the elements with even and the second those with odd numbers: so bf16 is converted in
// place, without moving it between lanes. Otherwise they follow each other.
template <typename T>
constexpr bool kEvenAndOdd = sizeof(T) == 2 && kLanes < 16 && !kNarrowsAtOnce;

// Numbers of the elements in load_two's lanes.
template <typename T>
inline TwoVectors element_numbers() {
  const Floats lanes = __builtin_convertvector(lane_numbers(), Floats);
  if constexpr (kEvenAndOdd<T>) return {lanes * 2.0f, lanes * 2.0f + 1.0f};
  return {lanes, lanes + float(kLanes)};
}

// bf16 pairs: the even elements, and the odd ones.
inline TwoVectors load_even_odd(const BFloat16* from) {
  Words bits;
  std::memcpy(&bits, from, sizeof bits);
  return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)};
}

inline void store_even_odd(BFloat16* to, TwoVectors x) {
#if defined(__AVX512BF16__)
  const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x.first));
  const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x.second));
  const Words bits = (Words)even | ((Words)odd << 16);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i even = (__m256i)(rounded_to_upper(x.first) >> 16), odd = (__m256i)rounded_to_upper(x.second);
  const __m256i bits = _mm256_blend_epi16(even, odd, 0xaa);
#else
  const Words bits = (rounded_to_upper(x.first) >> 16) | (rounded_to_upper(x.second) & 0xffff0000u);
#endif
  std::memcpy(to, &bits, sizeof bits);
}

template <typename T>
inline TwoVectors load_two(const T* from) {
  if constexpr (kEvenAndOdd<T>) {
    return load_even_odd(from);
  } else {
    return {load(from), load(from + kLanes)};
  }
}

template <typename T>
inline void store_two(T* to, TwoVectors x) {
  if constexpr (kEvenAndOdd<T>) {
    store_even_odd(to, x);
  } else {
    store(to, x.first);
    store(to + kLanes, x.second);
  }
}

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
#endif
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

// Lane-wise maximum; y where either is NaN.
inline Floats larger(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

// Lane-wise minimum; y where either is NaN.
inline Floats smaller(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)x, (__m256)y);
#else
  return x < y ? x : y;
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

constexpr float kLog2E = 1.44269504088896341f;

#if !defined(__AVX512F__)

// Adding it rounds x, |x| < 2^22, to an integer n, whose lowest bits the sum then has as n + 127: fp32's exponent.
constexpr float kRoundingBias = 12582912.0f + 127.0f;  // 1.5 * 2^23 + 127

// 2^n for n + kRoundingBias, n = -127 to 128: 0 for -127 and infinity for 128.
inline Floats power_of_two(Floats biased) { return (Floats)((Ints)biased << 23); }

#endif

// e^x within 2 ulp; NaN stays NaN. Denormal results may be zero; above 88 the result may be infinite, and with AVX-512
// it is undefined above 2^22. x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial for e^r is that of the Cephes library
// (Moshier 1989).
inline Floats exp(Floats x) {
#if defined(__AVX512F__)
  const Floats magic = broadcast(12582912.0f);
  const Floats within = larger(broadcast(-110.0f), x);
  Floats rounded = within * kLog2E + magic;  // adding 1.5 * 2^23 rounds to an integer
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
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Floats within = smaller(broadcast(88.8f), larger(broadcast(-88.0f), x));
  const Floats biased = within * kLog2E + kRoundingBias, n = biased - kRoundingBias;
  Floats r = within - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  // Half as many dependent operations as Horner's rule: an AVX2 processor waits for them more than for the number.
  const Floats square = r * r;
  const Floats low = 1.6666665459e-1f * r + 5.0000001201e-1f, middle = 8.3334519073e-3f * r + 4.1665795894e-2f;
  const Floats high = 1.9875691500e-4f * r + 1.3981999507e-3f;
  const Floats p = ((high * square + middle) * square + low) * square + r + 1.0f;
  return p * power_of_two(biased);
#endif
}

// 2^x for x <= 127 within 1 ulp, or within 3e-6 if the result is rounded to bf16; NaN stays NaN, denormal results may
// be zero. The polynomials for 2^r are 1 at 0 and minimize the maximum relative error (fitted by weighted least
// squares): for 0 <= r < 1 with AVX-512, which rounds down in one instruction, otherwise for |r| <= 1/2.
template <typename RoundedTo = float>
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const Floats within = larger(broadcast(-150.0f), x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)within, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
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
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Floats within = larger(broadcast(-127.0f), x);
  const Floats biased = within + kRoundingBias, r = within - (biased - kRoundingBias), square = r * r;
  Floats p;
  if constexpr (sizeof(RoundedTo) == 2) {
    p = 9.582852262499131e-3f * r + 5.590642745262884e-2f;
    p = p * square + (2.402409864788755e-1f * r + 6.931241930642397e-1f);
  } else {
    p = 1.5353361322954185e-4f * r + 1.3398874474710615e-3f;
    p = p * square + (9.618437362741730e-3f * r + 5.550332470280827e-2f);
    p = p * square + (2.4022647913558723e-1f * r + 6.931472028554574e-1f);
  }
  p = p * r + 1.0f;
  return p * power_of_two(biased);
#endif
}

// e^x as exp, but within 1e-5 for |x| < 88 if the result is rounded to bf16 and there is no AVX-512.
template <typename RoundedTo>
inline Floats exp_for(Floats x) {
#if !defined(__AVX512F__)
  if constexpr (sizeof(RoundedTo) == 2) return exp2<BFloat16>(smaller(broadcast(128.0f), x * kLog2E));
#endif
  return exp(x);
}

}  // namespace megads
