// What each AVX-512 instruction of kernels/native/src/simd_avx512.h does, lane by lane, in plain C++ for processors that
// have none: written from the operation sections of Intel's instruction reference, not from the code that uses them.
// Included before that header, it takes the place of its types and intrinsics.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define QUIRE_AVX512_MODEL 1

namespace avx512_model {

struct alignas(64) F32 {
  float lane[16];
};
struct alignas(64) I32 {
  std::int32_t lane[16];
};
struct alignas(64) BF16 {
  std::uint16_t lane[32];
};
struct alignas(32) HalfBF16 {
  std::uint16_t lane[16];
};

template <class To, class From>
To cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &x, sizeof to);
  return to;
}

template <class Function>
F32 floats(const Function& of) {
  F32 out;
  for (int i = 0; i < 16; ++i) out.lane[i] = of(i);
  return out;
}

template <class Function>
I32 ints(const Function& of) {
  I32 out;
  for (int i = 0; i < 16; ++i) out.lane[i] = of(i);
  return out;
}

template <class T>
T read(const void* p) {
  T out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

// An aligned load faults on any other address.
template <class T>
T read_aligned(const void* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % 64 != 0) __builtin_trap();
  return read<T>(p);
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float widened(std::uint16_t x) { return cast<float>(static_cast<std::uint32_t>(x) << 16); }

// VCVTNEPS2BF16: to nearest even, denormals to zero, a NaN made quiet.
inline std::uint16_t narrowed(float x) {
  const std::uint32_t bits = cast<std::uint32_t>(flushed(x));
  if (std::isnan(x)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// VDPBF16PS: first the odd product, then the even one, each fused; denormals are zero on the way in and out.
inline F32 dpbf16(F32 sum, BF16 x, BF16 y) {
  return floats([&](int i) {
    const auto product = [&](float to, int at) {
      return flushed(std::fma(flushed(widened(x.lane[at])), flushed(widened(y.lane[at])), flushed(to)));
    };
    return product(product(sum.lane[i], 2 * i + 1), 2 * i);
  });
}

// VPDPBUSD: four unsigned bytes of x times four signed bytes of y, added without saturation.
inline I32 dpbusd(I32 sum, I32 x, I32 y) {
  return ints([&](int i) {
    std::uint32_t total = static_cast<std::uint32_t>(sum.lane[i]);
    for (int k = 0; k < 4; ++k) {
      const std::int32_t a = static_cast<std::uint8_t>(static_cast<std::uint32_t>(x.lane[i]) >> 8 * k);
      const std::int32_t b = static_cast<std::int8_t>(static_cast<std::uint32_t>(y.lane[i]) >> 8 * k);
      total += static_cast<std::uint32_t>(a * b);
    }
    return static_cast<std::int32_t>(total);
  });
}

// VPDPWSSD: two signed words of x times two of y, added without saturation.
inline I32 dpwssd(I32 sum, I32 x, I32 y) {
  return ints([&](int i) {
    std::uint32_t total = static_cast<std::uint32_t>(sum.lane[i]);
    for (int k = 0; k < 2; ++k) {
      const std::int32_t a = static_cast<std::int16_t>(static_cast<std::uint32_t>(x.lane[i]) >> 16 * k);
      const std::int32_t b = static_cast<std::int16_t>(static_cast<std::uint32_t>(y.lane[i]) >> 16 * k);
      total += static_cast<std::uint32_t>(a * b);
    }
    return static_cast<std::int32_t>(total);
  });
}

// VSCALEFPS: x * 2^floor(n).
inline float scalef(float x, float n) {
  if (std::isnan(x) || std::isnan(n)) return NAN;
  return n > 1000.0f ? x * INFINITY : n < -1000.0f ? x * 0.0f : std::ldexp(x, static_cast<int>(std::floor(n)));
}

// VCVTPS2DQ: to nearest even; what does not fit becomes the "integer indefinite".
inline std::int32_t rounded(float x) {
  if (!(x >= -2147483648.0f && x < 2147483648.0f)) return INT32_MIN;
  return static_cast<std::int32_t>(std::nearbyint(x));
}

inline __m128i low_bytes(I32 x) {
  std::uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(x.lane[i]);
  return read<__m128i>(bytes);
}

// The upper half of the register a cast makes wider holds anything: what must not count.
inline I32 wider(__m256i x) {
  BF16 out;
  const auto lanes = cast<HalfBF16>(x);
  for (int i = 0; i < 32; ++i) out.lane[i] = i < 16 ? lanes.lane[i] : 0x7fc1;
  return cast<I32>(out);
}

// VPERMW with zeroing: word i of the result is the word of x that the lower five bits of index word i name.
inline I32 permuted_words(std::uint32_t mask, I32 index, I32 x) {
  const auto places = cast<BF16>(index), words = cast<BF16>(x);
  BF16 out;
  for (int i = 0; i < 32; ++i) out.lane[i] = (mask >> i & 1) != 0 ? words.lane[places.lane[i] & 31] : 0;
  return cast<I32>(out);
}

template <class Function>
I32 longs(const Function& of) {
  std::uint64_t lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = of(i);
  return read<I32>(lanes);
}

inline std::uint64_t long_of(const I32& x, int i) {
  std::uint64_t lanes[8];
  std::memcpy(lanes, &x, sizeof lanes);
  return lanes[i];
}

// VPUNPCKLQDQ and VPUNPCKHQDQ: of each 128 bits the low (or high) half of x, then of y.
inline I32 unpack(I32 x, I32 y, int high) {
  return longs([&](int i) { return long_of(i % 2 == 0 ? x : y, i / 2 * 2 + high); });
}

// VPUNPCKLDQ and VPUNPCKHDQ, and the same for floats: of each 128 bits the low (or high) half, alternately from x and y.
template <class T>
T unpack_lanes(T x, T y, int high) {
  T out;
  for (int i = 0; i < 16; ++i) out.lane[i] = (i % 2 == 0 ? x : y).lane[i / 4 * 4 + i % 4 / 2 + 2 * high];
  return out;
}

// VINSERTI32X4: x with 128 bits replaced. The rest of a register that a cast makes wider holds anything.
inline I32 insert(I32 x, __m128i y, int place) {
  std::memcpy(x.lane + 4 * place, &y, sizeof y);
  return x;
}

// VPMOVZXBW: 32 unsigned bytes to words.
inline I32 widened_bytes(__m256i x) {
  std::uint8_t bytes[32];
  std::memcpy(bytes, &x, sizeof bytes);
  std::uint16_t words[32];
  for (int i = 0; i < 32; ++i) words[i] = bytes[i];
  return read<I32>(words);
}

// VPMOVDW: the lower words; VPMOVSDW: the nearest words.
inline __m256i low_words(I32 x, bool saturates) {
  std::uint16_t words[16];
  for (int i = 0; i < 16; ++i) {
    const std::int32_t lane = x.lane[i];
    words[i] = static_cast<std::uint16_t>(!saturates ? lane : lane > 32767 ? 32767 : lane < -32768 ? -32768 : lane);
  }
  return read<__m256i>(words);
}

inline HalfBF16 narrow(F32 x) {
  HalfBF16 out;
  for (int i = 0; i < 16; ++i) out.lane[i] = narrowed(x.lane[i]);
  return out;
}

inline float total(F32 x) {
  float sum = 0.0f;
  for (float lane : x.lane) sum += lane;
  return sum;
}

}  // namespace avx512_model

#define __m512 avx512_model::F32
#define __m512i avx512_model::I32
#define __m512bh avx512_model::BF16
#define __m256bh avx512_model::HalfBF16
#define QUIRE_LANES(expression) avx512_model::floats([=](int i) { return expression; })

#define _mm512_setzero_ps() QUIRE_LANES((static_cast<void>(i), 0.0f))
#define _mm512_setzero_si512() avx512_model::ints([](int) { return 0; })
inline __m512 model_set1(float x) { return QUIRE_LANES((static_cast<void>(i), x)); }
inline __m512i model_set1(std::int32_t x) {
  return avx512_model::ints([=](int) { return x; });
}
#define _mm512_set1_ps(x) model_set1(static_cast<float>(x))
#define _mm512_set1_epi32(x) model_set1(static_cast<std::int32_t>(x))
template <class... Lanes>
inline __m512i model_setr(Lanes... lanes) {
  return {{lanes...}};
}
#define _mm512_setr_epi32(...) model_setr(__VA_ARGS__)
template <class... Lanes>
inline __m512 model_setr_floats(Lanes... lanes) {
  return {{static_cast<float>(lanes)...}};
}
#define _mm512_setr_ps(...) model_setr_floats(__VA_ARGS__)
#define _mm512_loadu_ps(p) avx512_model::read<__m512>(p)
#define _mm512_load_ps(p) avx512_model::read_aligned<__m512>(p)
#define _mm512_load_si512(p) avx512_model::read_aligned<__m512i>(p)
inline void model_store(float* p, __m512 x) { std::memcpy(p, &x, sizeof x); }
#define _mm512_storeu_ps(p, x) model_store(p, x)
inline __m512 model_add(__m512 x, __m512 y) { return QUIRE_LANES(x.lane[i] + y.lane[i]); }
inline __m512 model_sub(__m512 x, __m512 y) { return QUIRE_LANES(x.lane[i] - y.lane[i]); }
inline __m512 model_mul(__m512 x, __m512 y) { return QUIRE_LANES(x.lane[i] * y.lane[i]); }
inline __m512 model_div(__m512 x, __m512 y) { return QUIRE_LANES(x.lane[i] / y.lane[i]); }
inline __m512 model_fma(__m512 x, __m512 y, __m512 z) { return QUIRE_LANES(std::fma(x.lane[i], y.lane[i], z.lane[i])); }
// The second operand where either is a NaN.
inline __m512 model_max(__m512 x, __m512 y) { return QUIRE_LANES(x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]); }
inline __m512 model_min(__m512 x, __m512 y) { return QUIRE_LANES(x.lane[i] < y.lane[i] ? x.lane[i] : y.lane[i]); }
inline __m512 model_abs(__m512 x) { return QUIRE_LANES(std::fabs(x.lane[i])); }
// Immediate 0: no digits behind the point, to nearest even.
inline __m512 model_round(__m512 x) { return QUIRE_LANES(std::nearbyint(x.lane[i])); }
inline __m512 model_scalef(__m512 x, __m512 n) { return QUIRE_LANES(avx512_model::scalef(x.lane[i], n.lane[i])); }
inline __m512 model_to_float(__m512i x) { return QUIRE_LANES(static_cast<float>(x.lane[i])); }
inline __m512 model_unsigned_to_float(__m512i x) {
  return QUIRE_LANES(static_cast<float>(static_cast<std::uint32_t>(x.lane[i])));
}
inline __m512i model_rounded(__m512 x) {
  return avx512_model::ints([=](int i) { return avx512_model::rounded(x.lane[i]); });
}
inline __m512i model_add(__m512i x, __m512i y) {
  return avx512_model::ints([=](int i) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(x.lane[i]) + static_cast<std::uint32_t>(y.lane[i]));
  });
}
inline __m512 model_widen_halves(__m256i x) {
  float lanes[16];
  _mm256_storeu_ps(lanes, _mm256_cvtph_ps(_mm256_castsi256_si128(x)));
  _mm256_storeu_ps(lanes + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
  return QUIRE_LANES(lanes[i]);
}
inline __m256 model_half(__m512 x, int half) { return _mm256_loadu_ps(x.lane + 8 * half); }
inline __m512i model_shift_right(__m512i x, int by) {
  return avx512_model::ints([=](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x.lane[i]) >> by); });
}
inline __m512i model_set1_long(long long x) {
  return avx512_model::longs([=](int) { return static_cast<std::uint64_t>(x); });
}
inline __m512i model_setr_long(long long a, long long b, long long c, long long d, long long e, long long f, long long g,
                               long long h) {
  const long long lanes[8] = {a, b, c, d, e, f, g, h};
  return avx512_model::read<__m512i>(lanes);
}
inline __m512i model_add_long(__m512i x, __m512i y) {
  return avx512_model::longs([&](int i) { return avx512_model::long_of(x, i) + avx512_model::long_of(y, i); });
}
// VPMULUDQ: the lower halves, unsigned, to 64 bits.
inline __m512i model_mul_long(__m512i x, __m512i y) {
  return avx512_model::longs([&](int i) {
    return (avx512_model::long_of(x, i) & 0xffffffffu) * (avx512_model::long_of(y, i) & 0xffffffffu);
  });
}
inline __m512i model_shift_long(__m512i x, int left, int right) {
  return avx512_model::longs([&](int i) { return avx512_model::long_of(x, i) << left >> right; });
}
inline __m512i model_blend(unsigned mask, __m512i x, __m512i y) {
  return avx512_model::ints([&](int i) { return (mask >> i & 1) != 0 ? y.lane[i] : x.lane[i]; });
}
// Predicate 21 (NLT_UQ): not less, or one is a NaN.
inline std::uint16_t model_not_less(__m512 x, __m512 y) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(!(x.lane[i] < y.lane[i])) << i;
  return static_cast<std::uint16_t>(mask);
}
#define _mm512_srli_epi32(x, by) model_shift_right(x, by)
#define _mm512_set1_epi64(x) model_set1_long(x)
#define _mm512_setr_epi64(...) model_setr_long(__VA_ARGS__)
#define _mm512_add_epi64(x, y) model_add_long(x, y)
#define _mm512_mul_epu32(x, y) model_mul_long(x, y)
#define _mm512_srli_epi64(x, by) model_shift_long(x, 0, by)
#define _mm512_slli_epi64(x, by) model_shift_long(x, by, 0)
#define _mm512_xor_si512(x, y) avx512_model::ints([&](int i) { return (x).lane[i] ^ (y).lane[i]; })
#define _mm512_and_si512(x, y) avx512_model::ints([&](int i) { return (x).lane[i] & (y).lane[i]; })
// The lower halves of the products.
inline __m512i model_mul(__m512i x, __m512i y) {
  return avx512_model::ints([&](int i) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(x.lane[i]) * static_cast<std::uint32_t>(y.lane[i]));
  });
}
#define _mm512_mullo_epi32(x, y) model_mul(x, y)
inline __m512i model_sub_bytes(__m512i x, __m512i y) {
  std::uint8_t a[64], b[64];
  std::memcpy(a, &x, sizeof a);
  std::memcpy(b, &y, sizeof b);
  for (int i = 0; i < 64; ++i) a[i] = static_cast<std::uint8_t>(a[i] - b[i]);
  return avx512_model::read<__m512i>(a);
}
#define _mm512_sub_epi8(x, y) model_sub_bytes(x, y)
// An aligned store faults on any other address.
inline void model_store(void* p, __m512i x) {
  if (reinterpret_cast<std::uintptr_t>(p) % 64 != 0) __builtin_trap();
  std::memcpy(p, &x, sizeof x);
}
#define _mm512_store_si512(p, x) model_store(p, x)
#define _mm512_or_si512(x, y) avx512_model::ints([&](int i) { return (x).lane[i] | (y).lane[i]; })
#define _mm512_mask_blend_epi32(mask, x, y) model_blend(mask, x, y)
#define _mm512_unpacklo_epi64(x, y) avx512_model::unpack(x, y, 0)
#define _mm512_unpackhi_epi64(x, y) avx512_model::unpack(x, y, 1)
#define _mm512_castps_si512(x) avx512_model::cast<__m512i>(x)
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(x, y, predicate) (static_assert_not_less<(predicate)>(), model_not_less(x, y))
template <int Predicate>
inline void static_assert_not_less() {
  static_assert(Predicate == 21);
}
#define _mm512_add_ps(x, y) model_add(x, y)
#define _mm512_add_epi32(x, y) model_add(x, y)
#define _mm512_sub_ps(x, y) model_sub(x, y)
#define _mm512_mul_ps(x, y) model_mul(x, y)
#define _mm512_div_ps(x, y) model_div(x, y)
#define _mm512_fmadd_ps(x, y, z) model_fma(x, y, z)
#define _mm512_max_ps(x, y) model_max(x, y)
#define _mm512_min_ps(x, y) model_min(x, y)
#define _mm512_abs_ps(x) model_abs(x)
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(x, mode) (static_assert_nearest<(mode)>(), model_round(x))
template <int Mode>
inline void static_assert_nearest() {
  static_assert(Mode == 0);
}
#define _mm512_scalef_ps(x, n) model_scalef(x, n)
#define _mm512_reduce_add_ps(x) avx512_model::total(x)
#define _mm512_castps512_ps256(x) model_half(x, 0)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, half) model_half(x, half)
#define _mm512_castsi512_ps(x) avx512_model::cast<__m512>(x)
#define _mm512_cvtepi32_ps(x) model_to_float(x)
#define _mm512_cvtepu32_ps(x) model_unsigned_to_float(x)
#define _mm512_cvtps_epi32(x) model_rounded(x)
#define _mm512_cvtepi32_epi8(x) avx512_model::low_bytes(x)
// VPMOVSXBD: sixteen signed bytes to 32 bits.
inline __m512i model_widen_bytes(__m128i x) {
  std::int8_t bytes[16];
  std::memcpy(bytes, &x, sizeof bytes);
  return avx512_model::ints([&](int i) { return bytes[i]; });
}
#define _mm512_cvtph_ps(x) model_widen_halves(x)
#define _mm512_cvtepi8_epi32(x) model_widen_bytes(x)
// VPMOVZXBD: sixteen unsigned bytes to 32 bits.
inline __m512i model_widen_unsigned_bytes(__m128i x) {
  std::uint8_t bytes[16];
  std::memcpy(bytes, &x, sizeof bytes);
  return avx512_model::ints([&](int i) { return bytes[i]; });
}
#define _mm512_cvtepu8_epi32(x) model_widen_unsigned_bytes(x)
// VPERMPS: lane i of the result is the lane of x that the lower four bits of index i name.
#define _mm512_permutexvar_ps(index, x) QUIRE_LANES((x).lane[(index).lane[i] & 15])
#define _mm512_slli_epi32(x, by) \
  avx512_model::ints([&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>((x).lane[i]) << (by)); })
#define _mm512_castsi256_si512(x) avx512_model::wider(x)
#define _mm512_maskz_permutexvar_epi16(mask, index, x) avx512_model::permuted_words(mask, index, x)
#define _mm512_cvtneps_pbh(x) avx512_model::narrow(x)
#define _mm512_dpbf16_ps(sum, x, y) avx512_model::dpbf16(sum, x, y)
#define _mm512_dpbusd_epi32(sum, x, y) avx512_model::dpbusd(sum, x, y)
inline __m512bh model_as_bf16(__m512i x) { return avx512_model::cast<__m512bh>(x); }
#define _mm512_dpwssd_epi32(sum, x, y) avx512_model::dpwssd(sum, x, y)
#define _mm512_unpacklo_epi32(x, y) avx512_model::unpack_lanes(x, y, 0)
#define _mm512_unpackhi_epi32(x, y) avx512_model::unpack_lanes(x, y, 1)
#define _mm512_unpacklo_ps(x, y) avx512_model::unpack_lanes(x, y, 0)
#define _mm512_unpackhi_ps(x, y) avx512_model::unpack_lanes(x, y, 1)
#define _mm512_castsi128_si512(x) avx512_model::insert(_mm512_set1_epi32(0x7fc17fc1), x, 0)
#undef _mm512_inserti32x4
#define _mm512_inserti32x4(x, y, place) avx512_model::insert(x, y, place)
#define _mm512_cvtepu8_epi16(x) avx512_model::widened_bytes(x)
#define _mm512_cvtepi32_epi16(x) avx512_model::low_words(x, false)
#define _mm512_cvtsepi32_epi16(x) avx512_model::low_words(x, true)
// VPERMT2D: lane i of the result is the lane of x, then y, that the lower five bits of index i name.
#define _mm512_permutex2var_epi32(x, index, y) \
  avx512_model::ints([&](int i) { return ((index).lane[i] & 16 ? y : x).lane[(index).lane[i] & 15]; })
// VMOVDQU32 with zeroing: lanes outside the mask are 0, and their memory is not read.
inline __m512i model_load_some(unsigned mask, const void* p) {
  return avx512_model::ints([&](int i) {
    return mask >> i & 1 ? avx512_model::read<std::int32_t>(static_cast<const char*>(p) + 4 * i) : 0;
  });
}
#define _mm512_maskz_loadu_epi32(mask, p) model_load_some(mask, p)
// VSHUFI32X4: two of the 128-bit parts of x, then two of those of y, as pairs of bits of the number name them.
inline __m512i model_shuffle_parts(__m512i x, __m512i y, int parts) {
  return avx512_model::ints([&](int i) { return (i < 8 ? x : y).lane[(parts >> (i / 4 * 2) & 3) * 4 + i % 4]; });
}
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(x, y, parts) model_shuffle_parts(x, y, parts)
inline void model_store_anywhere(void* p, __m512i x) { std::memcpy(p, &x, sizeof x); }
#define _mm512_storeu_si512(p, x) model_store_anywhere(p, x)
