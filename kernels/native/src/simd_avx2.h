// Vector operations for AVX2 with FMA. A vector is 16 floats in two registers.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "format.h"

namespace quire {
namespace {

constexpr int kThisLevel = 1;

struct V {
  __m256 a, b;
};

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256 widen8(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline V load(const uint16_t* p) { return {widen8(p), widen8(p + 8)}; }
inline V load(const int8_t* p) {
  const auto eight = [](const int8_t* q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
  };
  return {eight(p), eight(p + 8)};
}
// The exponent of float16 is biased by 15, that of e4m3 by 7. So the bits in float16 are a number that is 2^8 too small;
// subnormal numbers included. All are exact. NaN needs no case, because it has a scale of NaN.
inline V load(const Fp8* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  const __m256 factor = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor)};
}
// The 32 elements of a group of an int4 KV cache.
inline void load_group(const Int4* p, float scale, float offset, V* out) {
  const __m256 factor = _mm256_set1_ps(scale), added = _mm256_set1_ps(offset);
  const auto eight = [=](__m128i codes) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)), factor, added);
  };
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), low_bits = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(pairs, low_bits), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_bits);
  out[0] = {eight(low), eight(_mm_srli_si128(low, 8))};
  out[1] = {eight(high), eight(_mm_srli_si128(high, 8))};
}
// Sixteen numbers in float16.
inline V load_halves(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Scales and zero points of a group of int4 weights (format.h).
inline V load_scales(const char* header) {
  const auto eight = [=](int first) {
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header + 2 * first)));
    const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(header + 32 + first)));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(high, 16), _mm256_slli_epi32(low, 8)));
  };
  return {eight(0), eight(8)};
}
inline V load_zero_points(const char* header) {
  const auto eight = [=](int first) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(header + 48 + first))));
  };
  return {eight(0), eight(8)};
}
// Rounds to nearest, ties to even; NaN stays NaN.
inline __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
inline void store(uint16_t* p, V x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
// Rounds to the nearest integers, which fit into a byte.
inline void store(int8_t* p, V x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // 0-3 8-11 4-7 12-15
  const __m256i bytes = _mm256_packs_epi16(words, words);
  const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(in_order));
}
// Stores 32 integers from 0 to 15, the codes of a group of an int4 KV cache.
inline void store_halves(Int4* p, V low, V high) {
  const auto pairs = [](__m256 x, __m256 y) {
    const __m256i high_bits = _mm256_slli_epi32(_mm256_cvtps_epi32(y), 4);
    return _mm256_and_si256(_mm256_or_si256(_mm256_cvtps_epi32(x), high_bits), _mm256_set1_epi32(255));
  };
  const __m256i words = _mm256_packus_epi32(pairs(low.a, high.a), pairs(low.b, high.b));  // 0-3 8-11 4-7 12-15
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(in_order));
}
inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// x * y + z
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// Returns the larger; y if either is NaN.
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V fused(V x, V y, V z) { return fma(x, y, z); }  // rounds once, at every level
inline V abs(V x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline V round(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
// Returns x * 2^n for integers n in [-126, 127].
inline V scale_by_power(V x, V n) {
  const auto one = [](__m256 value, __m256 power) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(value, _mm256_castsi256_ps(exponent));
  };
  return {one(x.a, n.a), one(x.b, n.b)};
}
inline float sum8(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float sum(V x) { return sum8(_mm256_add_ps(x.a, x.b)); }
// Widens bf16 with the fewest instructions: of 16 elements the even ones, then the odd ones.
inline V load_mixed(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_and_si256(x, high))};
}
// Permutes elements to the order of `load_mixed`, and back.
inline V mix(V x) {
  const auto fours = [](__m256 y) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(y), 0xd8)); };
  return {fours(_mm256_shuffle_ps(x.a, x.b, 0x88)), fours(_mm256_shuffle_ps(x.a, x.b, 0xdd))};
}
inline V unmix(V x) {
  const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
// Partial dot product, whose lanes must still be summed.
using Partial = __m256;
inline Partial no_sum() { return _mm256_setzero_ps(); }
inline Partial add_product(Partial sum, V x, V y) {
  return _mm256_fmadd_ps(x.b, y.b, _mm256_fmadd_ps(x.a, y.a, sum));
}
inline void finish_eight(const Partial* sums, float* out) {
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
  const __m256 crossed = _mm256_permute2f128_ps(low, high, 0x21), blended = _mm256_blend_ps(low, high, 0xf0);
  _mm256_storeu_ps(out, _mm256_add_ps(crossed, blended));
}

// Sixteen lanes of two words, or of one integer.
struct Words {
  __m256i a, b;
};

inline Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words load_words(const char* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline Words set1_words(const int16_t* p) {  // a pair
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
// Adds the products of pairs of words.
inline Words dot_words(Words sum, Words x, Words w) {
  sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, w.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, w.b))};
  // Otherwise the compiler adds the products first, and runs out of registers.
  __asm__("" : "+x"(sum.a), "+x"(sum.b));
  return sum;
}
inline V words_to_float(Words sums) { return {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)}; }
// Rounds 16 floats to words.
inline void store_words(int16_t* p, V x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // 0-3 8-11 4-7 12-15
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
// Lanes 0, 2, ... of x and then y, or lanes 1, 3, ...
inline Words alternate(Words x, Words y, int64_t odd) {
  const auto half = [odd](__m256i low, __m256i high) {
    const __m256 first = _mm256_castsi256_ps(low), second = _mm256_castsi256_ps(high);
    const __m256 taken = odd != 0 ? _mm256_shuffle_ps(first, second, 0xdd) : _mm256_shuffle_ps(first, second, 0x88);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(taken), 0xd8);
  };
  return {half(x.a, x.b), half(y.a, y.b)};
}
// Converts pairs of float16.
inline void widen_pairs(Words pairs, V* first, V* second) {
  const auto widen = [](__m256i low, __m256i high) {
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    return V{_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  };
  const __m256i low = _mm256_set1_epi32(0xffff);
  *first = widen(_mm256_and_si256(pairs.a, low), _mm256_and_si256(pairs.b, low));
  *second = widen(_mm256_srli_epi32(pairs.a, 16), _mm256_srli_epi32(pairs.b, 16));
}
// The codes of one group of the keys of 16 tokens, `stride` bytes apart: a token per lane, and two elements per vector.
// Vector 4 d + j has elements 4 d + j / 2 and 4 d + j / 2 + 2; for an odd j, 16 more.
inline void load_keys(const char* p, int64_t stride, Words* out) {
  const __m256i codes = _mm256_set1_epi32(0x000f000f);
  for (int half = 0; half < 2; ++half, p += 8 * stride) {
    const auto row = [&](int token) {
      return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(p + (token + 4) * stride),
                                 reinterpret_cast<const __m128i*>(p + token * stride));
    };
    const __m256i rows[4] = {row(0), row(1), row(2), row(3)};
    const __m256i low01 = _mm256_unpacklo_epi32(rows[0], rows[1]), high01 = _mm256_unpackhi_epi32(rows[0], rows[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(rows[2], rows[3]), high23 = _mm256_unpackhi_epi32(rows[2], rows[3]);
    const __m256i columns[4] = {_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
                                _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)};
    for (int column = 0; column < 4; ++column)
      for (int i = 0; i < 4; ++i) {
        Words& to = out[4 * column + i];
        (half == 0 ? to.a : to.b) = _mm256_and_si256(_mm256_srli_epi32(columns[column], 4 * i), codes);
      }
  }
}
// The codes of one group of the values of 16 tokens: an element per lane, and two tokens per vector. Vector 2 i has
// elements 0 .. 15 of tokens 2 i and 2 i + 1, and the next one elements 16 .. 31.
inline void load_values(const char* p, int64_t stride, Words* out) {
  const __m256i codes = _mm256_set1_epi16(15);
  for (int i = 0; i < 8; ++i, p += 2 * stride) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + stride));
    const __m256i low = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(x, y)), high = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(x, y));
    out[2 * i] = {_mm256_and_si256(low, codes), _mm256_and_si256(high, codes)};
    out[2 * i + 1] = {_mm256_srli_epi16(low, 4), _mm256_srli_epi16(high, 4)};
  }
}
// The largest lane of each of four vectors.
inline void largest_of_four(const V* x, float* out) {
  const auto both = [](V first, V second) {
    const __m256 eight = _mm256_max_ps(first.a, first.b), others = _mm256_max_ps(second.a, second.b);
    return _mm256_castps_pd(_mm256_max_ps(_mm256_unpacklo_ps(eight, others), _mm256_unpackhi_ps(eight, others)));
  };
  const __m256d low = both(x[0], x[1]), high = both(x[2], x[3]);
  const __m256 four = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low, high)),
                                    _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}

// Bit mask of the lanes that are not less than those of y (NaN is not less), lane 0 lowest.
inline uint32_t not_less(V x, V y) {
  const uint32_t low = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ)));
  return low | static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ))) << 8;
}
// Returns the bits of the lanes as integers.
inline V bits_as_float(V x) {
  return {_mm256_cvtepi32_ps(_mm256_castps_si256(x.a)), _mm256_cvtepi32_ps(_mm256_castps_si256(x.b))};
}

// Operands of Philox: eight lanes of 64 bits, of which the lower halves are used.
struct W {
  __m256i a, b;
};

inline W wide(uint64_t x) {
  return {_mm256_set1_epi64x(static_cast<int64_t>(x)), _mm256_set1_epi64x(static_cast<int64_t>(x))};
}
// first .. first + 7, in the order of lanes that `in_order` takes.
inline W count_from(uint64_t first) {
  const W at = wide(first);
  return {_mm256_add_epi64(at.a, _mm256_setr_epi64x(0, 2, 1, 3)), _mm256_add_epi64(at.b, _mm256_setr_epi64x(4, 6, 5, 7))};
}
inline W product(W x, W y) { return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)}; }
inline W upper(W x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
inline W either(W x, W y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
// Returns the 32 words of eight counters: the four of the first, the four of the second ...
inline void in_order(W w0, W w1, W w2, W w3, V* words) {
  const auto half = [](__m256i x0, __m256i x1, __m256i x2, __m256i x3) {
    const __m256i first = _mm256_blend_epi32(x0, _mm256_slli_epi64(x1, 32), 0xaa);
    const __m256i second = _mm256_blend_epi32(x2, _mm256_slli_epi64(x3, 32), 0xaa);
    return V{_mm256_castsi256_ps(_mm256_unpacklo_epi64(first, second)),
             _mm256_castsi256_ps(_mm256_unpackhi_epi64(first, second))};
  };
  words[0] = half(w0.a, w1.a, w2.a, w3.a);
  words[1] = half(w0.b, w1.b, w2.b, w3.b);
}
// Converts 16 unsigned words.
inline V words_as_float(V words) {
  const auto one = [](__m256 x) {
    const __m256i word = _mm256_castps_si256(x);
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(word, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(0x1p16f), low);
  };
  return {one(words.a), one(words.b)};
}

inline void prefetch_near(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
inline void prefetch_far(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

// One step of a product, by format. A step may have two halves, so that only the widened weights of one half need
// registers.

// Volatile, so that the compiler does not load the inputs of all rows in advance, for which there are no registers.
inline __m256 broadcast(const float* p) {
  __m256 x;
  __asm__ __volatile__("vbroadcastss %1, %0" : "=x"(x) : "m"(*p));
  return x;
}

struct Float32Step {
  static constexpr bool kGrouped = false;
  using Sum = V;
  using Weight = V;
  using Input = __m256;
  using Element = float;  // of the activations
  static constexpr int kHalves = 1;
  static constexpr int kInputs = 1;  // elements of the activations in a step
  static Sum zero_sum() { return zero(); }
  static Weight weight(const char* line, int) {
    return {_mm256_load_ps(reinterpret_cast<const float*>(line)),
            _mm256_load_ps(reinterpret_cast<const float*>(line) + 8)};
  }
  static Input input(const Element* x, int) { return broadcast(x); }
  static Sum dot(Sum sum, Input x, Weight w) { return {_mm256_fmadd_ps(x, w.a, sum.a), _mm256_fmadd_ps(x, w.b, sum.b)}; }
  static V to_float(Sum sum) { return sum; }
};

struct BFloat16Step : Float32Step {
  static constexpr int kHalves = 2;
  static constexpr int kInputs = 2;
  static Weight weight(const char* line, int half) {
    const __m256i a = _mm256_load_si256(reinterpret_cast<const __m256i*>(line));
    const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32));
    if (half == 0) return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
  }
  static Input input(const Element* x, int half) { return broadcast(x + half); }
};

// Activations are signed bytes. vpmaddubsw multiplies them with unsigned weights, and adds pairs in 16 bits: room for
// the products of four lines.
struct Int4Step {
  struct Sum {
    __m256i a, b;
  };
  using Weight = Sum;
  using Input = __m256i;
  using Element = int8_t;
  static constexpr bool kGrouped = true;
  static constexpr int kParts = 2;  // of the lines of a group, each with sums of its own
  static constexpr int kHalves = 2;
  static constexpr int kInputs = 8;
  static Sum zero_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Weight weight(const char* line, int half) {
    const auto nibbles = [half](const char* p) {
      const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
      return _mm256_and_si256(half == 0 ? x : _mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
    };
    return {nibbles(line), nibbles(line + 32)};
  }
  static Input input(const Element* x, int half) {
    return _mm256_castps_si256(broadcast(reinterpret_cast<const float*>(x + 4 * half)));
  }
  static Sum dot(Sum sum, Input x, Weight w) {
    sum = {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, x)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, x))};
    __asm__("" : "+x"(sum.a), "+x"(sum.b));  // as for int8
    return sum;
  }
  static V to_float(Sum sum) {
    const auto wide = [](__m256i x) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(x, _mm256_set1_epi16(1))); };
    return {wide(sum.a), wide(sum.b)};
  }
};

// Activations are 16 bits wide, four inputs in the order 0, 2, 1, 3: vpmaddwd takes the even, then the odd ones.
struct Int8Step {
  static constexpr bool kGrouped = false;
  struct Sum {
    __m256i a, b;
  };
  using Weight = Sum;
  using Input = __m256i;
  using Element = int16_t;
  static constexpr int kHalves = 2;
  static constexpr int kInputs = 4;
  static constexpr int kOffset = 0;  // added to every quantised activation
  static Sum zero_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Weight weight(const char* line, int half) {
    const __m256i a = _mm256_load_si256(reinterpret_cast<const __m256i*>(line));
    const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32));
    if (half == 0) return {_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8)};
    return {_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8)};
  }
  static Input input(const Element* x, int half) {
    return _mm256_castps_si256(broadcast(reinterpret_cast<const float*>(x + 2 * half)));
  }
  static Sum dot(Sum sum, Input x, Weight w) {
    sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x, w.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x, w.b))};
    // Otherwise the compiler adds the products of the halves first, and runs out of registers.
    __asm__("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
  }
  static V to_float(Sum sum) { return {_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)}; }
  static void quantise(const float* x, float inverse, Element* out) {  // 16 floats
    const V scaled = mul(load(x), set1(inverse));
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b)), 0xd8);
    const __m256i even_odd = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), even_odd);
  }
};

// Codes of five or six bits: pairs are widened at once, for which 16 bits have room.
struct WideCodesStep : Int4Step {
  static Sum dot(Sum sum, Input x, Weight w) {
    const auto wide = [x](__m256i total, __m256i codes) {
      return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
    };
    sum = {wide(sum.a, w.a), wide(sum.b, w.b)};
    __asm__("" : "+x"(sum.a), "+x"(sum.b));  // as for int8
    return sum;
  }
  static V to_float(Sum sum) { return {_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)}; }
};

template <int kFormat>
struct GgufStep : Int4Step {};

template <>
struct GgufStep<kQ5_K> : WideCodesStep {
  template <int kQuad>
  static Weight weight(const char* low, const char* high) {
    const auto bits = [](const char* p) {
      const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
      const __m256i moved = kQuad < 4 ? _mm256_slli_epi16(x, kQuad < 4 ? 4 - kQuad : 0)
                                      : _mm256_srli_epi16(x, kQuad < 4 ? 0 : kQuad - 4);
      return _mm256_and_si256(moved, _mm256_set1_epi8(16));
    };
    const Weight w = Int4Step::weight(low, kQuad % 2);
    return {_mm256_or_si256(w.a, bits(high)), _mm256_or_si256(w.b, bits(high + 32))};
  }
};

template <>
struct GgufStep<kQ6_K> : WideCodesStep {
  template <int kQuad>
  static Weight weight(const char* low, const char* high) {
    const auto bits = [](const char* p) {
      const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
      const __m256i moved = kQuad < 2 ? _mm256_slli_epi16(x, kQuad < 2 ? 4 - 2 * kQuad : 0)
                                      : _mm256_srli_epi16(x, kQuad < 2 ? 0 : 2 * kQuad - 4);
      return _mm256_and_si256(moved, _mm256_set1_epi8(48));
    };
    const Weight w = Int4Step::weight(low, kQuad % 2);
    return {_mm256_or_si256(w.a, bits(high)), _mm256_or_si256(w.b, bits(high + 32))};
  }
};

// Signed weights: the sign moves to the activations, because vpmaddubsw has one unsigned operand.
template <>
struct GgufStep<kQ8_0> : WideCodesStep {
  static Weight weight(const char* line) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(line)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32))};
  }
  static Sum dot(Sum sum, Input x, Weight w) {
    const auto wide = [x](__m256i total, __m256i codes) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
      return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    };
    sum = {wide(sum.a, w.a), wide(sum.b, w.b)};
    __asm__("" : "+x"(sum.a), "+x"(sum.b));  // as for int8
    return sum;
  }
};
constexpr int kByteOffset = 0;  // added to the weights of Q8_0 before the product

// 16 registers: up to 12 of sums, two of weights, one of inputs.
constexpr bool kFewRegisters = true;
constexpr int kMaxTileRows = 6;
constexpr int kGgufTileRows = 4;  // of the types of GGUF
constexpr int64_t kChunkBytes = 5 << 16;  // for L2 caches of 512 KiB or more
constexpr int tile_blocks(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

}  // namespace
}  // namespace quire
